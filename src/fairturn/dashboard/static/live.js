// One stream of events for all tabs of a browser, and word to each of them.

const ports = new Set();
let source = null, state = "live", failed = 0;

function say(message) { for (const port of ports) port.postMessage(message); }

function listen(address) {
  if (source) return;
  source = new EventSource(address);
  source.onopen = () => { failed = 0; state = "live"; say("changed"); };
  source.addEventListener("changed", () => say("changed"));
  source.onerror = () => {
    failed += 1;
    state = failed > 2 ? "off" : "polling";
    say(state);
    if (source.readyState === EventSource.CLOSED) {
      source = null;
      setTimeout(() => { if (ports.size) listen(address); }, 5000);
    }
  };
}

onconnect = (event) => {
  const [port] = event.ports;
  ports.add(port);
  port.onmessage = (message) => {
    if (message.data === "gone") {
      ports.delete(port);
      if (!ports.size) { source?.close(); source = null; }
    } else {
      port.postMessage(state);
      listen(message.data.listen);
    }
  };
  port.start();
};
