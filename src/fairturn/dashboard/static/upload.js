// Files that are dropped or chosen go out one after another, each with its progress. The words are
// in the form, from the server.

const form = document.getElementById("drop");
const list = document.getElementById("uploads");
const files = document.getElementById("files");
const kindField = document.getElementById("upload-kind"); // only in a queue with several kinds of work
const queue = [];
let sending = false;

if (form) {
  document.getElementById("upload-go").hidden = true;
  for (const name of ["dragenter", "dragover"])
    form.addEventListener(name, (event) => { event.preventDefault(); form.classList.add("over"); });
  for (const name of ["dragleave", "drop"])
    form.addEventListener(name, () => form.classList.remove("over"));
  form.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files); });
  files.addEventListener("change", () => { take(files.files); files.value = ""; });
  form.addEventListener("submit", (event) => event.preventDefault());
}

function take(chosen) {
  for (const file of chosen) {
    const row = document.createElement("li");
    const name = document.createElement("bdi");
    const told = document.createElement("span");
    const progress = document.createElement("progress");
    name.textContent = file.name;
    told.textContent = form.dataset.waiting;
    told.className = "muted";
    progress.max = 1;
    progress.value = 0;
    progress.setAttribute("aria-label", file.name);
    row.append(name, told, progress);
    list.prepend(row);
    queue.push({ file, row, told, progress, key: crypto.randomUUID(), kind: kindField?.value });
  }
  send();
}

function send() {
  if (sending || !queue.length) return;
  sending = true;
  const { file, row, told, progress, key, kind } = queue.shift();
  const request = new XMLHttpRequest();
  const end = (text, kind) => {
    told.textContent = text;
    told.className = kind;
    progress.remove();
    sending = false;
    window.fairturn.refresh();
    send();
  };
  const query = new URLSearchParams({ name: file.name, ...(kind && { kind }) });
  request.open("POST", `${form.dataset.address}?${query}`);
  request.setRequestHeader("Content-Type", "application/octet-stream");
  request.setRequestHeader("Idempotency-Key", key);
  request.upload.onprogress = (event) => {
    told.textContent = form.dataset.sending;
    if (event.lengthComputable) progress.value = event.loaded / event.total;
  };
  request.onload = () => {
    if (request.status === 201 || request.status === 200) {
      const link = document.createElement("a");
      link.href = `${document.documentElement.dataset.root}/documents/${JSON.parse(request.responseText).id}`;
      link.append(row.firstChild);
      row.prepend(link);
      end(form.dataset.done, "good");
    } else {
      const why = new DOMParser().parseFromString(request.responseText, "text/html").querySelector("main h1");
      end(why ? `${form.dataset.failed}: ${why.textContent}` : form.dataset.failed, "failed");
    }
  };
  request.onerror = () => end(form.dataset.failed, "failed");
  if (file.size > Number(form.dataset.max)) end(form.dataset.large, "failed");
  else request.send(file);
}
