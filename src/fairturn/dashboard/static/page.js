// What a page does by itself. Without it every page still works: links, forms, and a reload.
// No text is made here; what is said comes from the server, in the reader's language.

const root = document.documentElement;
const language = root.lang.length === 2 ? root.lang : "en";

// ── Keyboard ────────────────────────────────────────────────────────────────────────────────────

let first = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); search.select(); }
  } else if (event.key === "?") {
    document.getElementById("keys")?.showModal();
  } else if (first === "g") {
    const to = document.querySelector(`[data-keys="g ${CSS.escape(event.key)}"]`);
    if (to) { event.preventDefault(); to.click(); }
  }
  first = event.key;
});

// One open menu at a time, closed by Escape or a click elsewhere.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]"))
    if (!menu.contains(event.target)) menu.open = false;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const menu = document.querySelector("details.menu[open]");
  if (menu) { menu.open = false; menu.querySelector("summary").focus(); }
});

// ── Timestamps: in the reader's time zone, and counting ────────────────────────────────────────────

const whole = new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
const minute = new Intl.DateTimeFormat(language, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const decimal = root.dataset.decimal || ".";
// The clock of the server is the one that counts.
let ahead = 0;

function digits(number, after) { return number.toFixed(after).replace(".", decimal); }

function short(us) {
  let left = Math.max(0, us / 1e6);
  if (left < 10) return `${digits(left, 1)}\u00a0s`;
  left = Math.round(left);
  const parts = [];
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const n = Math.floor(left / length);
    left -= n * length;
    if (n || parts.length) parts.push([n, `${n}\u00a0${unit}`]);
    if (parts.length === 2 || (parts.length && n >= 30)) break;
  }
  return parts.filter(([n], place) => place === 0 || n).map((part) => part[1]).join(" ");
}

function clock(us) {
  const seconds = Math.max(0, Math.round(us / 1e6));
  const two = (n) => String(n).padStart(2, "0");
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

function tick() {
  const now = Date.now() * 1000 + ahead;
  for (const each of document.querySelectorAll("[data-since]"))
    each.textContent = short(now - Number(each.dataset.since));
  for (const each of document.querySelectorAll("[data-until]"))
    each.textContent = (each.dataset.form === "clock" ? clock : short)(Number(each.dataset.until) - now);
}

function localize(scope) {
  for (const time of scope.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (Number.isNaN(at.valueOf())) continue;
    if (time.title) time.title = whole.format(at);
    if (time.hasAttribute("data-exact")) time.textContent = whole.format(at);
  }
  for (const label of scope.querySelectorAll("text[data-at]"))
    label.textContent = minute.format(new Date(Number(label.dataset.at) / 1000));
}

// ── Blocks that change: asked for as HTML, replaced where they differ ───────────────────────────

function replace(fresh, ids) {
  const wanted = ids ?? [...document.querySelectorAll("[data-live]")].map((block) => block.id);
  for (const id of wanted) {
    const [old, young] = [document.getElementById(id), fresh.getElementById(id)];
    if (old && !young) { location.reload(); return; } // it is another page now: no longer empty
    if (!old || old.dataset.live === "while-there") continue;
    const active = old.contains(document.activeElement) ? document.activeElement : null;
    if (active?.matches("input, textarea, select") || old.querySelector("dialog[open]")) continue;
    for (const details of young.querySelectorAll("details[id]"))
      details.open = document.getElementById(details.id)?.open ?? details.open;
    localize(young);
    still(old);
    still(young);
    mark(old, young);
    swap(old, young);
    if (active && !active.isConnected) focusAgain(active, document.getElementById(id));
  }
  tick();
}

// Only the smallest parts that differ are new: a table of fifty rows is not laid out each second.
function swap(old, young) {
  if (old.isEqualNode(young)) return;
  const [here, there] = [[...old.children], [...young.children]];
  const own = (each) => [...each.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join();
  const alike = here.length && here.length === there.length && own(old) === own(young)
    && old.cloneNode().isEqualNode(young.cloneNode());
  if (alike) here.forEach((each, place) => swap(each, there[place]));
  else old.replaceWith(young);
}

// What counts by itself, and what has moved in before, makes no difference.
function still(block) {
  for (const each of block.querySelectorAll("[data-since], [data-until]")) each.textContent = "";
  for (const each of block.querySelectorAll(".moves")) each.classList.remove("moves");
}

function focusAgain(gone, block) {
  const again = gone.id
    ? document.getElementById(gone.id)
    : [...block.querySelectorAll("a, button, summary")].find(
        (each) => each.tagName === gone.tagName && each.href === gone.href && each.textContent === gone.textContent);
  again?.focus({ preventScroll: true });
}

// What was not there before moves in; all else stands still.
function mark(old, young) {
  const known = new Set([...old.querySelectorAll("[data-id]")].map((each) => each.dataset.id));
  if (!known.size) return;
  for (const each of young.querySelectorAll("[data-id]"))
    if (!known.has(each.dataset.id)) each.classList.add("moves");
}

async function ask(address) {
  const answer = await fetch(address, { headers: { "X-Fairturn-Live": "1" }, redirect: "manual" });
  if (answer.type === "opaqueredirect") location.reload(); // the session has ended, or the demo
  if (!answer.ok) throw new Error(String(answer.status));
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

const LIVE_MS = 1000;
const ENOUGH = 20; // found documents, before somebody has to ask for more
const POLL_MS = 5000;
let asked = 0, pending = null, busy = false, succeeded = Date.now(), failed = 0;

function address() { return document.body.dataset.address ?? location.href; }

function refresh() {
  if (pending || !document.querySelector("[data-live]")) return;
  const wait = document.hidden ? null : Math.max(0, asked + LIVE_MS - Date.now());
  if (wait === null) { pending = "hidden"; return; }
  pending = setTimeout(async () => {
    pending = null;
    if (busy) return;
    busy = true;
    asked = Date.now();
    try {
      const from = address();
      const fresh = await ask(from);
      if (from === address()) replace(fresh); // a form may have chosen another one meanwhile
      failed = 0;
      succeeded = Date.now();
      tell();
    } catch {
      failed += 1;
      tell();
      setTimeout(refresh, 2 * LIVE_MS);
    }
    busy = false;
  }, wait);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && pending === "hidden") { pending = null; refresh(); }
});

let state = "live";
function tell() {
  const off = failed >= 2 || state === "off";
  const banner = document.getElementById("cut-off");
  banner.hidden = !off;
  if (off) banner.textContent = banner.dataset.text.replace("{at}", minute.format(succeeded));
  for (const status of document.querySelectorAll(".status")) {
    status.classList.toggle("off", off);
    for (const each of status.querySelectorAll("[data-when]"))
      each.hidden = each.dataset.when !== (off ? "off" : state === "polling" ? "polling" : "live");
  }
}

// One worker hears for all tabs; where there is none, or it hears nothing, this page asks again.
function listen(address) {
  let settled = null;
  const heard = (message) => {
    if (message.data === "changed") {
      state = "live";
      refresh();
      // What the service sums up by looking once a second comes a little after what has changed.
      clearTimeout(settled);
      settled = setTimeout(refresh, 2 * LIVE_MS);
    }
    else { state = message.data; tell(); }
    if (message.data === "off") failed = 2;
  };
  try {
    const worker = new SharedWorker(document.body.dataset.worker, { name: "fairturn" });
    worker.port.onmessage = heard;
    worker.port.start();
    worker.port.postMessage({ listen: new URL(address, location.href).href });
    addEventListener("pagehide", () => worker.port.postMessage("gone"));
    worker.onerror = () => { state = "polling"; tell(); };
  } catch { state = "polling"; tell(); }
  const every = Number(document.querySelector("[data-live=always][data-every]")?.dataset.every ?? POLL_MS);
  setInterval(() => { if (state !== "live" || document.querySelector("[data-live=always]")) refresh(); }, every);
}

// ── Forms that show what they would find while it is typed ──────────────────────────────────────

let typed = null, looks = 0;

function look(form) {
  const ids = form.dataset.replace.split(" ");
  const isBusy = (busy) => { for (const id of ids) document.getElementById(id).ariaBusy = busy; };
  clearTimeout(typed);
  typed = setTimeout(async () => {
    if (!form.checkValidity()) return;
    const mine = (looks += 1);
    const address = new URL(form.action);
    address.hash = "";
    address.search = new URLSearchParams(new FormData(form)).toString();
    isBusy("true");
    try {
      const fresh = await ask(address);
      if (mine === looks) { replace(fresh, ids); history.replaceState(null, "", address); lookOn(); }
    } catch { /* the button still works */ }
    if (mine === looks) isBusy(null);
  }, 250);
}

// Forms come and go with blocks that change.
document.addEventListener("input", (event) => {
  const form = event.target.closest("form[data-replace]");
  if (form) look(form);
});
for (const form of document.querySelectorAll("form[data-replace]")) {
  // Somebody may have typed before this script had come.
  if ([...form.elements].some((each) => each.matches("input") && each.value !== each.defaultValue)) look(form);
}

// ── A look through many documents goes on by itself until enough are found ──────────────────────

let looking = false;

async function lookOn() {
  if (looking) return;
  looking = true;
  for (let block; (block = document.querySelector("[data-further]")); ) {
    block.ariaBusy = "true";
    let fresh;
    try { fresh = await ask(block.dataset.further); } catch { block.ariaBusy = null; break; }
    if (block.isConnected) add(fresh, block); // or else another look has begun meanwhile
  }
  looking = false;
}

// What one more look has found comes below what is there.
function add(fresh, block) {
  const [table, more] = [block.parentElement.querySelector("tbody"), fresh.querySelector("#further")];
  const found = [...fresh.querySelectorAll("tbody tr")];
  const rows = found.filter((row) => row.dataset.id);
  if (!table.querySelector("[data-id]")) table.replaceChildren(...found);
  else table.append(...rows);
  localize(table);
  if (table.querySelectorAll("[data-id]").length >= ENOUGH) more?.removeAttribute("data-further");
  if (more) block.replaceWith(more); else block.remove();
}

// ── Copying ─────────────────────────────────────────────────────────────────────────────────────

document.addEventListener("click", async (event) => {
  const copier = event.target.closest("[data-copy]");
  if (copier) {
    const text = document.getElementById(copier.dataset.copy).textContent;
    try { await navigator.clipboard.writeText(text); copier.textContent = copier.dataset.done; } catch { /* select by hand */ }
  }
});

localize(document);
const told = Number(root.dataset.now);
if (told) ahead = told - Date.now() * 1000;
setInterval(tick, 1000);
lookOn();
if (document.body.dataset.events && document.querySelector("[data-live]")) listen(document.body.dataset.events);
window.fairturn = { ask, replace, refresh };
