// The viewer's own script. Pages work without it; it loads what a page leaves out, follows new
// commits, and opens dialogs. Everything it inserts was rendered and escaped by the server.

const MAX_ROWS = 280; // elements of a timeline that are kept in the page
const EDGE = "600px";
const CHARTS_MS = 2500; // between two measurements of the charts

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

async function text(url) {
  const answer = await fetch(url, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.status === 205) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  return answer.text();
}

function parsed(html) {
  return new DOMParser().parseFromString(html, "text/html");
}

// --- parts that are loaded later -----------------------------------------------------------

async function fill(element) {
  const url = element.dataset.fill;
  delete element.dataset.fill;
  try {
    element.replaceChildren(...parsed(await text(url)).body.childNodes);
    // Measuring the charts has also measured the sizes in the list: show them.
    if (element.id === "charts") {
      await show_list();
      if ($("[data-again]", element)) measure_later();
    }
  } catch (error) {
    element.append(note("This could not be loaded."));
  }
}

function note(words) {
  const made = document.createElement("p");
  made.className = "note";
  made.textContent = words;
  return made;
}

async function open_level(details) {
  const url = details.dataset.load;
  if (!url || !details.open) return;
  delete details.dataset.load;
  try {
    details.append(...parsed(await text(url)).body.childNodes);
    listen(details);
  } catch (error) {
    details.append(note("This could not be loaded."));
  }
}

async function more_of_level(event) {
  event.preventDefault();
  const link = event.currentTarget;
  const body = parsed(await text(link.href)).body;
  const nodes = [...body.childNodes];
  link.replaceWith(...nodes);
  for (const one of nodes) if (one.nodeType === Node.ELEMENT_NODE) listen(one.parentNode ?? one);
}

function listen(root) {
  for (const one of $$("details[data-load]", root)) {
    one.addEventListener("toggle", () => open_level(one), { once: true });
  }
  for (const one of $$("a[data-load]", root)) {
    if (!one.dataset.heard) one.addEventListener("click", more_of_level);
    one.dataset.heard = "1";
  }
}

// --- the timeline ----------------------------------------------------------------------------

let observer = null;
let loading = false;

function pane() {
  const found = $("#timeline");
  return found && getComputedStyle(found).overflowY === "auto" ? found : null;
}

function rows_url(parameters) {
  const url = new URL($("#timeline").dataset.rows, location.href);
  for (const [name, value] of Object.entries(parameters)) url.searchParams.set(name, value);
  return url;
}

function place_of(list, end) {
  const rows = $$("li.row", list);
  return rows.length ? rows[end < 0 ? rows.length - 1 : 0] : null;
}

async function load_rows(direction) {
  const list = $("#timeline ol.rows");
  if (!list || loading) return 0;
  const edge = place_of(list, direction);
  const at = edge ? Number(edge.dataset.at) : 0;
  const wanted = direction > 0 ? { before: at } : { start: edge ? at + 1 : 0 };
  if (direction < 0 && edge) wanted.last = edge.dataset.digest;
  if (direction > 0 && at === 0) return 0;
  loading = true;
  try {
    const fresh = $("ol.rows", parsed(await text(rows_url(wanted))));
    const added = [...fresh.children];
    const count = $$("li.row", fresh).length;
    if (direction > 0) keeping_place(list, edge, () => list.prepend(...added));
    else list.append(...added);
    prune(list, direction);
    show_edges(list, Number(fresh.dataset.total));
    return count;
  } finally {
    loading = false;
  }
}

function keeping_place(list, anchor, change) {
  const before = anchor ? anchor.getBoundingClientRect().top : 0;
  change();
  if (anchor) (pane() ?? window).scrollBy(0, anchor.getBoundingClientRect().top - before);
}

function prune(list, direction) {
  const spare = list.children.length - MAX_ROWS;
  if (spare <= 0) return;
  if (direction > 0) for (let at = 0; at < spare; at++) list.lastElementChild.remove();
  else {
    const anchor = list.lastElementChild;
    keeping_place(list, anchor, () => {
      for (let at = 0; at < spare; at++) list.firstElementChild.remove();
    });
  }
}

function show_edges(list, total) {
  const first = place_of(list, 1);
  const last = place_of(list, -1);
  const earlier = first ? Number(first.dataset.at) : 0;
  const later = last ? total - Number(last.dataset.at) - 1 : 0;
  list.dataset.total = total;
  edge($("#earlier"), earlier, "earlier", first && { before: first.dataset.at });
  edge($("#later"), later, "later", last && { start: Number(last.dataset.at) + 1 });
}

function edge(element, count, word, parameters) {
  if (!count) {
    element.replaceChildren();
    return;
  }
  const url = new URL(rows_url(parameters ?? {}));
  url.pathname = "/session";
  const link = document.createElement("a");
  link.href = url;
  link.textContent = `${count.toLocaleString("en")} ${word} ${count === 1 ? "node" : "nodes"}`;
  element.replaceChildren(link);
}

function watch_edges() {
  observer?.disconnect();
  const timeline = $("#timeline");
  if (!timeline) return;
  observer = new IntersectionObserver(
    async (seen) => {
      for (const one of seen) {
        if (!one.isIntersecting || !one.target.firstElementChild) continue;
        await load_rows(one.target.id === "earlier" ? 1 : -1).catch(() => 0);
        // If it is still in sight, observing it again calls this function again.
        observer.unobserve(one.target);
        observer.observe(one.target);
      }
    },
    { root: pane(), rootMargin: EDGE },
  );
  observer.observe($("#earlier"));
  observer.observe($("#later"));
  for (const id of ["#earlier", "#later"]) {
    $(id).addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.target.tagName !== "A") return;
      event.preventDefault();
      load_rows(id === "#earlier" ? 1 : -1);
    });
  }
}

function is_at_end() {
  const box = pane();
  return box
    ? box.scrollHeight - box.scrollTop - box.clientHeight < 120
    : document.documentElement.scrollHeight - window.scrollY - window.innerHeight < 200;
}

function to_end() {
  const box = pane();
  if (box) box.scrollTop = box.scrollHeight;
}

function begin_timeline() {
  const chosen = document.getElementById(location.hash.slice(1)) ?? $(".row.selected");
  if (chosen) chosen.scrollIntoView({ block: "center" });
  else if (!new URLSearchParams(location.search).has("start")) to_end();
  watch_edges();
}

// --- new commits -------------------------------------------------------------------------------

let events = null;

function follow() {
  events?.close();
  events = null;
  const url = document.body.dataset.events;
  if (!url) return;
  events = new EventSource(url);
  events.addEventListener("hello", handle_event);
  events.addEventListener("change", handle_event);
  events.addEventListener("gone", () => {
    events.close();
    $("#live")?.replaceChildren("gone");
  });
}

let updating = Promise.resolve();

function handle_event(event) {
  if (document.body.dataset.page === "overview") {
    const version = JSON.parse(event.data).version;
    if (version !== document.body.dataset.version) updating = updating.then(update_overview).catch(() => {});
    return;
  }
  const revision = JSON.parse(event.data).revision;
  if (document.body.dataset.page === "waiting") {
    // The first commit may have come before the stream: then "hello" has a revision.
    if (event.type === "change" || revision) updating = updating.then(() => visit(location.href, false)).catch(() => {});
    return;
  }
  const known = Number(document.body.dataset.revision);
  if (event.type === "hello" && revision === known) return;
  updating = updating.then(() => update(revision)).catch(() => {});
}

async function update() {
  // A page of an earlier revision keeps its rows and state: only #about and #work are replaced.
  const url = new URL(location.href);
  url.searchParams.set("parts", "1");
  for (const name of ["before", "start", "node"]) url.searchParams.delete(name);
  const page = parsed(await text(url));
  const is_live = document.body.dataset.live === "1";
  const slider = $("#slider input[type=range]");
  const is_sliding = slider && slider === document.activeElement && !is_live;
  if (!is_sliding) {
    swap("#about", page);
    if (!$("dialog[open]")) for (const one of $$("dialog")) swap(`#${one.id}`, page);
  }
  if (is_live) {
    swap("#side", page);
    const stays = is_at_end();
    try {
      const later = $("#later a");
      if (!later) await append_all(stays);
    } catch (error) {
      // 205: the new path does not continue the rows shown, after a rewind or on another branch.
      if (error.status === 205) await visit(location.href, false);
    }
  } else swap("#work", page);
  document.body.dataset.revision = page.body.dataset.revision;
  begin();
}

let measuring = 0;

async function update_overview() {
  for (const row of await show_list()) row.classList.add("fresh");
  measure_later();
}

function measure_later() {
  // Charts need a pass over all objects, so they are loaded at most every few seconds.
  measuring ||= setTimeout(() => {
    measuring = 0;
    const charts = $("#charts");
    charts.dataset.fill = "/charts";
    fill(charts);
  }, CHARTS_MS);
}

let lists = 0;

async function show_list() {
  const number = ++lists;
  const page = parsed(await text(location.href));
  // Another list was requested after this one: drop this one.
  if (number !== lists) return [];
  const before = new Set($$("#list tr").map(row_state));
  // A row may have moved: the focus stays on its session.
  const focused = document.activeElement?.closest("#list a")?.getAttribute("href");
  for (const id of ["#list", "#health"]) {
    if ($(id).textContent !== $(id, page).textContent) swap(id, page);
  }
  if (focused) $(`#list a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  $(".total").textContent = $(".total", page).textContent;
  document.body.dataset.version = page.body.dataset.version;
  return $$("#list tbody tr").filter((row) => !before.has(row_state(row)));
}

function row_state(row) {
  return `${$("a", row)?.getAttribute("href")} ${row.dataset.state}`;
}

async function append_all(stays) {
  const list = $("#timeline ol.rows");
  // The server sends the events after the last node again with the rows that follow.
  while (list.lastElementChild?.classList.contains("event")) list.lastElementChild.remove();
  const before = new Set($$("li.row", list));
  for (let pages = 0; pages < 4; pages++) {
    if (!(await load_rows(-1))) break;
    if (!$("#later a")) break;
  }
  for (const one of $$("li.row", list)) if (!before.has(one)) one.classList.add("fresh");
  if (stays) to_end();
}

function swap(selector, page) {
  const old = $(selector);
  const fresh = $(selector, page);
  if (!old || !fresh) return;
  // What a reader has opened stays open.
  const opened = new Set($$("details[open]", old).map(path_of));
  const focused = old.contains(document.activeElement) ? path_to(document.activeElement, old) : null;
  const scrolled = old.scrollTop;
  old.replaceWith(fresh);
  for (const one of $$("details", fresh)) if (opened.has(path_of(one))) one.open = true;
  fresh.scrollTop = scrolled;
  if (focused) at_path(fresh, focused)?.focus({ preventScroll: true });
}

function path_of(details) {
  const names = [];
  for (let one = details; one; one = one.parentElement?.closest("details")) {
    names.push($(".key", one)?.textContent ?? "");
  }
  return names.join("\n");
}

function path_to(element, root) {
  const path = [];
  for (let one = element; one !== root; one = one.parentElement) {
    path.unshift([...one.parentElement.children].indexOf(one));
  }
  return path;
}

function at_path(root, path) {
  return path.reduce((one, at) => one?.children[at], root);
}

// --- going to a page without leaving this one -----------------------------------------------------

let visits = 0;

async function visit(url, push = true) {
  const number = ++visits;
  const page = parsed(await text(url));
  // Another visit has begun after this one: drop this one.
  if (number !== visits) return;
  const slider = document.activeElement?.closest("#slider input[type=range]");
  $("#main").replaceWith($("#main", page));
  for (const name of Object.keys(document.body.dataset)) delete document.body.dataset[name];
  Object.assign(document.body.dataset, page.body.dataset);
  document.title = page.title;
  if (push) history.pushState(null, "", url);
  if (slider) keep_slider(slider);
  begin();
  begin_timeline();
  follow();
}

function keep_slider(slider) {
  // The reader may be moving it: keep the same element with its value, and only set its range.
  const fresh = $("#slider input[type=range]");
  if (!fresh) return;
  [slider.min, slider.max] = [fresh.min, fresh.max];
  fresh.replaceWith(slider);
  slider.focus({ preventScroll: true });
  $("#slider output").textContent = slider.value;
}

function begin_slider() {
  const form = $("#slider");
  const range = form && $("input[type=range]", form);
  if (!range || range.dataset.heard) return;
  range.dataset.heard = "1";
  let timer = 0;
  range.addEventListener("input", () => ($("#slider output").textContent = range.value));
  range.addEventListener("change", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const url = new URL(location.href);
      for (const name of ["before", "start", "node", "leaf", "at"]) url.searchParams.delete(name);
      if (range.value !== range.max) url.searchParams.set("at", range.value);
      visit(url).catch(() => location.assign(url));
    }, 60);
  });
}

function begin_filter() {
  const form = $("form[data-live]");
  if (!form || form.dataset.heard) return;
  form.dataset.heard = "1";
  let timer = 0;
  const show = async () => {
    const url = new URL(form.action);
    for (const [name, value] of new FormData(form)) if (value) url.searchParams.set(name, value);
    // First: a live update that comes meanwhile loads the list of the page's URL.
    history.replaceState(null, "", url);
    await show_list();
  };
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => show().catch(() => form.submit()), 150);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show();
  });
}

// --- dialogs ---------------------------------------------------------------------------------------

document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-dialog]");
  if (opener) {
    const dialog = document.getElementById(opener.dataset.dialog);
    const node = $("input[name=node]", dialog);
    if (node) node.value = decodeURIComponent(opener.dataset.setNode ?? "");
    const shown = $("[data-shown]", dialog);
    if (shown) shown.textContent = opener.dataset.show ?? shown.dataset.default;
    dialog.showModal();
    return;
  }
  if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input:not([type=range]), textarea, select, dialog")) return;
  if (event.key === "/") {
    event.preventDefault();
    ($("form[data-live] input") ?? $("#goto")).focus();
  } else if (event.key === "[") $("#slider a[rel=prev]")?.click();
  else if (event.key === "]") $("#slider a[rel=next]")?.click();
});

window.addEventListener("popstate", () => {
  if (document.body.dataset.page === "session") visit(location.href, false);
  else location.reload();
});

function begin() {
  for (const one of $$("[data-fill]")) fill(one);
  listen(document);
  begin_slider();
  begin_filter();
}

begin();
begin_timeline();
follow();
document.documentElement.dataset.ready = "1";
