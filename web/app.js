// One event stream in, one page out. What comes from a request is only ever set as text, so that nobody can put markup
// here through a model's name or an id. Elements are kept and changed in place: a focus, a selection and a screen
// reader survive the next second.

const SOURCES = [
  ["device", "Engine’s own cache", "device"],
  ["staging", "Staging (shared rows)", "staging"],
  ["drive", "Own drive", "drive"],
  ["peer", "Other box", "peer"],
  ["computed", "Computed", "computed"],
];
const TIERS = { device: ["Device cache", "s-device"], staging: ["Staging", "s-staging"], drive: ["Drive", "s-drive"] };
const VERDICT = { ok: "healthy", degraded: "degraded", down: "not serving", unknown: "unknown" };
const SILENT_MS = 5000;

const at = (id) => document.getElementById(id);
const thin = "\u202f";

/** An element with a class, text and children. */
function el(tag, cls = "", text = "", ...children) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text) e.textContent = text;
  e.append(...children);
  return e;
}

function icon(name) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(ns, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** Sets text only where it changed. */
function put(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

function attr(e, name, value) {
  if (e.getAttribute(name) !== value) e.setAttribute(name, value);
}

/** Children of `parent` by key: made once, changed each time, taken away when gone, in the order of `items`. */
function each(parent, items, key, make, change) {
  const old = new Map([...parent.children].map((e) => [e.dataset.key, e]));
  let before = null;
  for (const item of items) {
    const k = key(item);
    let e = old.get(k);
    if (e) old.delete(k);
    else {
      e = make(item);
      e.dataset.key = k;
    }
    change(e, item);
    const place = before ? before.nextElementSibling : parent.firstElementChild;
    if (place !== e) parent.insertBefore(e, place);
    before = e;
  }
  for (const e of old.values()) e.remove();
}

// Numbers: three digits, thin spaces, never a share without "of what".
function digits(n) {
  if (n >= 99.95) return n.toFixed(0);
  return n >= 9.995 ? n.toFixed(1) : n.toFixed(2);
}
function count(n) {
  return String(Math.round(n)).replace(/\B(?=(\d{3})+$)/g, thin);
}
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let u = 0;
  while (n >= 1024 && u < units.length - 1) {
    n /= 1024;
    u += 1;
  }
  return (u ? digits(n) : String(n)) + thin + units[u];
}
function span(s) {
  if (s < 120) return `${Math.max(0, Math.round(s))}${thin}s`;
  if (s < 7200) return `${Math.floor(s / 60)}${thin}min`;
  if (s < 172800) return `${Math.floor(s / 3600)}${thin}h`;
  return `${Math.floor(s / 86400)}${thin}days`;
}
function ago(now, then) {
  const s = now - then;
  return s < 3 ? "just now" : `${span(s)} ago`;
}
function millis(ms) {
  return ms < 1000 ? `${ms}${thin}ms` : `${digits(ms / 1000)}${thin}s`;
}
function percent(part, whole) {
  if (!whole || !part) return `0${thin}%`;
  const p = (100 * part) / whole;
  if (p < 0.1) return `<${thin}0.1${thin}%`;
  // What is not everything is not shown as everything.
  return `${p > 99.9 && part < whole ? "99.9" : p >= 99.95 ? "100" : p.toFixed(1)}${thin}%`;
}
function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}
/** A fragment as a sentence. A first word that is somebody's name is left as it is. */
function sentence(text, names = []) {
  const t = text.trim();
  if (!t) return "";
  const word = t.split(" ", 1)[0];
  const name = /[^a-z,']/.test(word) || names.includes(word);
  return (name ? t : t[0].toUpperCase() + t.slice(1)) + (/[.!?]$/.test(t) ? "" : ".");
}
const ended = (text) => text.trim() + (/[.!?]$/.test(text.trim()) ? "" : ".");

/** A bar of the five sources, and its words for those who do not see it. */
function band(track, sums) {
  each(
    track,
    SOURCES.filter(([k]) => sums[k] > 0),
    ([k]) => k,
    ([k]) => el("i", `s-${k}`),
    (e, [k]) => {
      const grow = String(sums[k]);
      if (e.style.flexGrow !== grow) e.style.flexGrow = grow;
    },
  );
  attr(track, "role", "img");
  attr(track, "aria-label", words(sums) || "no tokens");
}
function words(sums) {
  return SOURCES.filter(([k]) => sums[k] > 0)
    .map(([k, , short]) => `${short} ${count(sums[k])}`)
    .join(", ");
}

function showSentence(state) {
  const { node, peers, alerts, totals } = state;
  let verdict = node.health.status;
  let first;
  let second;
  const peer = peers[0];
  const peerStatus = peer && (peer.connected ? (peer.view?.health.status ?? "unknown") : "down");
  if (verdict === "down") {
    first = `${node.name} does not serve requests.`;
    second = sentence(node.health.serving.replace(/^not at all: /, ""));
  } else if (alerts.length) {
    verdict = "degraded";
    const a = alerts[0];
    first = `${a.node}: ${ended(a.cause)}`;
    second = sentence(a.next_step) + (alerts.length > 1 ? ` ${alerts.length - 1} more below.` : "");
  } else if (verdict !== "ok") {
    first = `${node.name} serves, and not everything works.`;
    const bad = Object.values(node.health.checks).filter((c) => !c.ok).map((c) => sentence(c.what));
    second = bad.join(" ");
  } else if (peer && peerStatus !== "ok") {
    verdict = "degraded";
    const gone = `is gone for ${span(state.now_unix - peer.since_unix)}`;
    const how = !peer.connected ? gone : peerStatus === "unknown" ? "has not said yet how it is" : `is ${VERDICT[peerStatus]}`;
    first = `${node.name} is healthy; ${peer.name} ${how}.`;
    second = peer.view && peer.connected ? sentence(peer.view.health.serving) : "";
  } else {
    first = peer ? "Both boxes are healthy." : "This box is healthy and serves alone.";
  }
  if (verdict === "ok") {
    const parts = [];
    if (totals.prompt) {
      const cached = totals.prompt - totals.computed;
      parts.push(`${percent(cached, totals.prompt)} of ${count(totals.prompt)} prompt tokens came from cache.`);
    }
    const waits = state.requests.map((r) => r.ttft_ms).filter((ms) => ms != null);
    if (waits.length) {
      const n = waits.length;
      parts.push(`Nobody in the last ${n === 1 ? "request" : `${n} requests`} waited more than ${millis(Math.max(...waits))} for the first token.`);
    }
    second = parts.join(" ");
  }
  say(verdict, first, second ?? "");
  put(document.querySelector("title"), `${verdict === "ok" ? "✓" : "!"} ${node.name} · spark-kv`);
}

function say(verdict, first, second) {
  attr(at("head"), "data-verdict", verdict);
  attr(at("icon"), "href", `#i-${verdict}`);
  put(at("sentence"), first);
  put(at("detail"), second);
}

function showAlerts(state) {
  at("alerts").hidden = state.alerts.length === 0;
  each(
    at("alert-list"),
    state.alerts,
    (a) => `${a.node} ${a.id}`,
    () => {
      const head = el("div", "head", "", el("span", "code"), el("span", "node"), el("span", "since"));
      return el("li", "card", "", head, el("p", "cause"), el("p", "step"));
    },
    (e, a) => {
      put(e.querySelector(".code"), a.code);
      put(e.querySelector(".node"), `on ${a.node}`);
      put(e.querySelector(".since"), `since ${clock(a.since_unix)}, ${span(state.now_unix - a.since_unix)}`);
      put(e.querySelector(".cause"), sentence(a.cause, [state.node.name, ...state.peers.map((p) => p.name)]));
      put(e.querySelector(".step"), sentence(a.next_step));
    },
  );
}

function makeBox() {
  const chip = el("span", "chip", "", icon("unknown"), el("span"));
  const top = el("div", "top", "", el("h3"), chip, el("span", "seen"));
  return el("article", "card box", "", top, el("p", "model"), el("p", "engine"), el("div", "tiers"), el("ul", "checks"));
}

function showBox(e, { view, peer }, now) {
  const verdict = peer && !peer.connected ? "down" : (view?.health.status ?? "unknown");
  const name = view?.name || peer?.name || "this box";
  attr(e, "aria-label", name);
  e.classList.toggle("last-words", Boolean(peer && !peer.connected));
  put(e.querySelector("h3"), name);
  const chip = e.querySelector(".chip");
  attr(chip, "data-verdict", verdict);
  attr(chip.querySelector("use"), "href", `#i-${verdict}`);
  put(chip.querySelector("span"), peer && !peer.connected ? "gone" : VERDICT[verdict]);
  const seen = peer
    ? peer.connected
      ? `connected for ${span(now - peer.since_unix)}`
      : `last seen ${ago(now, peer.since_unix)}; below is what it said then`
    : "this box, now";
  put(e.querySelector(".seen"), seen);
  if (!view) {
    put(e.querySelector(".model"), peer?.address ?? "");
    put(e.querySelector(".engine"), "It has not said anything about itself yet.");
    return;
  }
  const { engine } = view;
  put(e.querySelector(".model"), engine.served_name || "no model yet");
  const since = engine.since_unix ? ` for ${span(now - engine.since_unix)}` : "";
  const parts = [`Engine ${engine.phase || "unknown"}${since}`, `${engine.running} running`];
  const inLine = Object.values(engine.waiting ?? {}).reduce((sum, n) => sum + n, 0);
  if (inLine) parts.push(`${inLine} in line`);
  if (engine.restarts) parts.push(`${engine.restarts} ${engine.restarts === 1 ? "restart" : "restarts"}`);
  put(e.querySelector(".engine"), parts.join(", ") + (engine.reason ? `. ${sentence(engine.reason)}` : "."));
  each(
    e.querySelector(".tiers"),
    view.tiers,
    (t) => t.name,
    (t) => {
      const track = el("div", "track", "", el("i", TIERS[t.name]?.[1] ?? ""), el("i"));
      attr(track, "aria-hidden", "true");
      return el("div", "tier", "", el("div", "words", "", el("span"), el("span")), track);
    },
    (row, t) => {
      const [label, amount] = row.querySelectorAll(".words span");
      put(label, TIERS[t.name]?.[0] ?? t.name);
      const known = t.used_bytes != null;
      put(amount, known
        ? `${count(t.rows)} rows, ${bytes(t.used_bytes)} of ${bytes(t.capacity_bytes)} (${percent(t.used_bytes, t.capacity_bytes)})`
        : `${t.rows ? `${count(t.rows)} rows, ` : ""}${bytes(t.capacity_bytes)}, kept by the engine`);
      const track = row.querySelector(".track");
      track.hidden = !known;
      const [used, rest] = track.children;
      const u = known ? Math.min(t.used_bytes, t.capacity_bytes) : 0;
      used.hidden = u === 0;
      used.style.flexGrow = String(u);
      rest.style.flexGrow = String(Math.max(t.capacity_bytes - u, 0));
    },
  );
  each(
    e.querySelector(".checks"),
    Object.entries(view.health.checks).filter(([k]) => k !== "engine"),
    ([k]) => k,
    () => el("li", "", "", el("span", "mark"), el("span", "what")),
    (li, [k, check]) => {
      li.className = check.ok ? "good" : "bad";
      put(li.querySelector(".mark"), check.ok ? "✓" : "!");
      put(li.querySelector(".what"), `${k}: ${check.what}`);
    },
  );
}

function showBoxes(state) {
  const own = { key: "own", kind: "box", view: state.node };
  const items = [own];
  for (const [n, peer] of state.peers.entries()) {
    items.push({ key: `cable${n}`, kind: "cable", peer }, { key: `peer${n}`, kind: "box", view: peer.view, peer });
  }
  if (!state.peers.length) items.push({ key: "no-cable", kind: "cable" }, { key: "alone", kind: "alone" });
  each(at("boxes"), items, (i) => i.key, makePart, (e, item) => showPart(e, item, state.now_unix));
}
function makePart(item) {
  if (item.kind === "box") return makeBox();
  if (item.kind === "cable") return el("div", "cable", "", el("b", "kind"), el("span", "wire"), el("span", "how"));
  const join = el("pre", "", "", el("code", "", "spark-kv up --join -"));
  return el(
    "div", "card teach box", "",
    el("h3", "", "No second box yet"),
    el("p", "", "Start this on the other box and give it the token that was printed when this one started:"),
    join,
    el("p", "note", "Each box then finds what the other has kept, and either one serves alone when the other is gone."),
  );
}
function showPart(e, item, now) {
  if (item.kind === "box") showBox(e, item, now);
  if (item.kind === "cable") {
    const state = !item.peer ? "none" : item.peer.connected ? "" : "broken";
    e.className = `cable ${state}`;
    put(e.querySelector(".kind"), item.peer ? "TCP" : "");
    put(e.querySelector(".how"), !item.peer ? "alone" : item.peer.connected ? "connected" : "no connection");
  }
}

function showSources(state) {
  const rows = [{ name: state.peers.length ? "Both boxes" : state.node.name, sums: state.totals, all: true }];
  if (state.peers.some((p) => p.view)) {
    rows.push({ name: state.node.name, sums: state.node.totals });
    for (const p of state.peers) if (p.view) rows.push({ name: p.view.name, sums: p.view.totals });
  }
  each(
    at("bands"),
    rows,
    (r) => `${r.all ? "all" : "one"} ${r.name}`,
    (r) => el("div", r.all ? "band all" : "band", "", el("span"), el("div", "track")),
    (e, r) => {
      put(e.querySelector("span"), r.name);
      band(e.querySelector(".track"), r.sums);
    },
  );
  put(at("sources-note"), state.totals.prompt
    ? `${count(state.totals.prompt)} prompt tokens in ${count(state.totals.prompts)} prompts since each box started.`
    : "No prompt was seen yet. The bar fills with the first one.");
  each(
    at("legend").tBodies[0],
    SOURCES,
    ([k]) => k,
    ([k, name]) => {
      const label = el("td", "", "", el("span", `swatch s-${k}`), name);
      return el("tr", "", "", label, el("td", "num share"), el("td", "num tokens"));
    },
    (tr, [k]) => {
      put(tr.querySelector(".share"), percent(state.totals[k], state.totals.prompt));
      put(tr.querySelector(".tokens"), count(state.totals[k]));
    },
  );
}

function showRequests(state) {
  const none = state.requests.length === 0;
  at("no-requests").hidden = !none;
  at("requests").hidden = none;
  if (none) {
    put(at("curl"), curl(state.node));
    return;
  }
  const seen = new Map();
  const rows = state.requests.map((r) => {
    const base = `${r.id} ${r.started_unix} ${r.node}`;
    const n = (seen.get(base) ?? 0) + 1;
    seen.set(base, n);
    return { key: `${base} ${n}`, r };
  });
  each(at("requests").tBodies[0], rows, (row) => row.key, makeRequest, (tr, { r }) => showRequest(tr, r, state.now_unix));
}
function makeRequest() {
  const cells = ["when", "endpoint", "box-name", "num prompt", "split", "num first", "answer", "why"];
  const tr = el("tr", "", "", ...cells.map((c) => el("td", c)));
  tr.querySelector(".split").append(el("span", "words"), el("div", "track"));
  return tr;
}
function showRequest(tr, r, now) {
  const cell = (c, text) => put(tr.querySelector(`.${c}`), text);
  cell("when", now - r.started_unix < 3600 ? ago(now, r.started_unix) : clock(r.started_unix));
  attr(tr.querySelector(".when"), "title", new Date(r.started_unix * 1000).toLocaleString());
  cell("endpoint", r.endpoint);
  attr(tr.querySelector(".endpoint"), "title", `${r.model} ${r.id}`);
  cell("box-name", r.forwarded_from ? `${r.node} (came in on ${r.forwarded_from})` : r.node);
  const prompt = r.sources?.prompt ?? r.prompt_tokens;
  cell("prompt", prompt == null ? "–" : count(prompt));
  put(tr.querySelector(".split .words"), r.sources ? words(r.sources) || "nothing" : "not reported");
  const track = tr.querySelector(".track");
  track.hidden = !r.sources || !r.sources.prompt;
  band(track, r.sources ?? {});
  cell("first", r.ttft_ms == null ? "–" : millis(r.ttft_ms));
  const failed = r.status >= 400 || r.broken;
  tr.querySelector(".answer").classList.toggle("failed", failed);
  const tokens = r.completion_tokens == null ? "" : `${count(r.completion_tokens)} tokens`;
  cell("answer", r.broken ? "broke off" : r.status === 499 ? "client left" : failed ? `failed, ${r.status}` : tokens || "done");
  attr(tr.querySelector(".answer"), "title", `status ${r.status}, ${millis(r.duration_ms)} in all`);
  cell("why", r.miss ? `${r.why} Computed again: ${r.miss.why}.` : r.why);
  attr(tr.querySelector(".why"), "title", r.miss ? `What to do: ${r.miss.advice}` : "");
}

function curl(node) {
  const key = node.needs_key ? " \\\n  -H 'Authorization: Bearer YOUR_KEY'" : "";
  // A name with a quote would end the shell's text.
  const model = JSON.stringify(node.engine.served_name || "MODEL").replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '{"model": ${model}, "messages": [{"role": "user", "content": "Hello"}]}'`;
}

function show(state) {
  for (const part of [showSentence, showAlerts, showBoxes, showSources, showRequests]) part(state);
}

// The stream. The browser comes back by itself after a cut, and we come back where it gives up.
let heard = 0;
let since = Date.now();
let stream;

// Where requests need a key, the page needs one too. It is kept in a cookie of this site, because an event stream
// cannot carry a header.
async function allowed() {
  const answer = await fetch("api/v1/alerts").catch(() => null);
  const refused = answer !== null && answer.status === 401;
  at("key").hidden = !refused;
  return !refused;
}
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = encodeURIComponent(at("key-text").value.trim());
  document.cookie = `sparkkv_key=${key}; path=/; SameSite=Strict; max-age=31536000`;
  at("key-text").value = "";
  listen();
});

async function listen() {
  if (stream) stream.close();
  if (!(await allowed())) return;
  stream = new EventSource("api/v1/events");
  stream.addEventListener("state", (event) => {
    const state = JSON.parse(event.data);
    // A node that has just begun has not looked at itself yet.
    if (!state.now_unix) return;
    heard = since = Date.now();
    show(state);
    told();
  });
}
function told() {
  const lost = Date.now() - since > SILENT_MS;
  document.body.classList.toggle("stale", lost);
  const when = new Date(since).toLocaleTimeString([], { hour12: false });
  put(at("link"), !lost ? (heard ? "live" : "connecting") : "no connection, trying again");
  if (lost) {
    const then = heard ? "What you see below is from then." : "";
    say("unknown", `No word from this box since ${when}.`, then);
    put(document.querySelector("title"), "? · spark-kv");
  }
}
setInterval(() => {
  told();
  if (stream && stream.readyState === EventSource.CLOSED) listen();
}, 2000);

// Colours: the system's, or the reader's choice.
const THEMES = [["", "automatic"], ["light", "light"], ["dark", "dark"]];
let theme = 0;
function paint() {
  const [name, word] = THEMES[theme];
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  put(at("theme"), `Colours: ${word}`);
}
function remembered(name) {
  // Storage may be forbidden; then the choice lasts as long as the page.
  try {
    if (name != null) localStorage.setItem("theme", name);
    return localStorage.getItem("theme") ?? "";
  } catch {
    return name ?? "";
  }
}
at("theme").addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  remembered(THEMES[theme][0]);
  paint();
});
at("copy").addEventListener("click", async () => {
  const line = at("curl");
  try {
    await navigator.clipboard.writeText(line.textContent);
    put(at("copied"), "copied");
  } catch {
    // Without a secure connection there is no clipboard: the line is marked, the reader copies.
    getSelection().selectAllChildren(line);
    put(at("copied"), "marked; copy it with the keyboard");
  }
});

theme = Math.max(0, THEMES.findIndex(([name]) => name === remembered()));
paint();
listen();
