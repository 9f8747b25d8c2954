// The sample browser. It unpacks the JSON in #data (base64 of gzip), shows 50 rows a page and one row in full.
// - Everything becomes text through textContent: what a model wrote is never parsed as markup.
// - The selected row lives in the address (#row=<id>&dataset=<name>&sample=<n>), so each row can be linked to.
// - Filters narrow each other; the ones about answers look at one run when one is chosen, else at all of them.
"use strict";
(async () => {
  const PAGE = 50;
  const at = (id) => document.getElementById(id);

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  let data;
  try {
    data = await unpack(at("data").textContent);
  } catch (error) {
    at("no-browser").textContent = `The samples cannot be unpacked (${error.message}); use a browser of 2023 or later.`;
    at("no-browser").hidden = false;
    return;
  }
  const state = { rows: data.rows, found: data.rows, selected: null, page: 0 };
  const selects = new Map(); // name → <select>
  const flags = new Map(); // name → checkbox

  // ---- small things -------------------------------------------------------------------------------------------

  function el(tag, className, ...content) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...content.filter((part) => part !== null));
    return node;
  }

  /** Text that someone else wrote: isolated, so that right-to-left marks in it cannot reorder the page. */
  const quote = (text) => el("bdi", "", text);
  /** Columns and labels can have any name, also those of Object.prototype. */
  const own = (object, key) => (Object.hasOwn(object, key) ? object[key] : null);
  const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
  const swatch = (colour) => {
    const node = el("span", `swatch s${colour}`);
    node.setAttribute("aria-hidden", "true");
    return node;
  };
  const runName = (number) => el("span", "run", swatch(data.runs[number].colour), quote(data.runs[number].name));
  const tag = (kind, text) => el("span", `tag ${kind}`, text);

  // ---- filters ------------------------------------------------------------------------------------------------

  const FLAGS = {
    "orders disagree": (row) => verdictsOf(row).some((verdict) => verdict.disagree),
    unreadable: (row) => verdictsOf(row).some((verdict) => verdict.state === "unreadable"),
    truncated: (row) => answersOf(row).some((answer) => answer.truncated),
    wrong: (row) => answersOf(row).some((answer) => answer.wrong),
    invalid: (row) => answersOf(row).some((answer) => answer.invalid !== null),
  };

  const chosen = (name) => (selects.has(name) ? selects.get(name).value : "");
  const chosenRun = () => (chosen("run") === "" ? null : Number(chosen("run")));

  function answersOf(row) {
    const run = chosenRun();
    return run === null ? row.answers : row.answers.filter((answer) => answer.run === run);
  }

  function verdictsOf(row) {
    const run = chosenRun();
    if (run === null) return row.verdicts;
    return row.verdicts.filter((verdict) => data.judges[verdict.judge].runs.includes(data.runs[run].name));
  }

  function haystack(row) {
    if (row.haystack === undefined) {
      const words = [row.id, row.title, row.reference ?? "", ...Object.values(row.fields)];
      for (const answer of row.answers) words.push(answer.text ?? "");
      for (const verdict of row.verdicts) for (const order of verdict.orders) words.push(order.raw ?? "");
      for (const prompt of row.prompts) for (const [, content] of prompt) words.push(content);
      row.haystack = words.join("\n").toLowerCase();
    }
    return row.haystack;
  }

  function matches(row, needle) {
    if (chosen("dataset") !== "" && row.dataset !== chosen("dataset")) return false;
    if (chosenRun() !== null && answersOf(row).length === 0) return false;
    for (const column of data.slices) {
      const wanted = chosen(`slice ${column}`);
      if (wanted !== "" && JSON.stringify(own(row.slices, column)) !== wanted) return false;
    }
    if (chosen("verdict") !== "" && !row.verdicts.some((verdict) => verdictKey(verdict) === chosen("verdict"))) return false;
    for (const [name, box] of flags) if (box.checked && !FLAGS[name](row)) return false;
    return needle === "" || haystack(row).includes(needle);
  }

  const verdictKey = (verdict) => `${verdict.judge} ${verdict.state}`;

  function applyFilters() {
    const needle = at("search").value.trim().toLowerCase();
    state.found = state.rows.filter((row) => matches(row, needle));
    at("found").textContent = `${state.found.length.toLocaleString("en")} of ${plural(state.rows.length, "row")}`;
    const place = state.found.indexOf(state.selected);
    state.page = place < 0 ? 0 : Math.floor(place / PAGE);
    showList();
  }

  function addSelect(name, label, groups, any) {
    const select = el("select");
    select.append(new Option(any, ""));
    for (const [title, options] of groups) {
      const target = title === "" ? select : el("optgroup");
      if (title !== "") target.label = title;
      target.append(...options.map(([value, text]) => new Option(text, value)));
      if (title !== "") select.append(target);
    }
    selects.set(name, select);
    at("selects").append(el("label", "", label, select));
  }

  function buildFilters() {
    if (data.datasets.length > 1) addSelect("dataset", "Dataset", [["", data.datasets.map((name) => [name, name])]], "All");
    addSelect("run", "Run", [["", data.runs.map((run, number) => [String(number), run.name])]], "All runs");
    for (const column of data.slices) addSelect(`slice ${column}`, column, [["", sliceOptions(column)]], "All");
    const verdicts = verdictGroups();
    if (verdicts.length > 0) addSelect("verdict", "Verdict", verdicts, "All");
    for (const [name, test] of Object.entries(FLAGS)) addFlag(name, state.rows.filter(test).length);
  }

  function sliceOptions(column) {
    const counts = new Map();
    for (const row of state.rows) {
      const value = own(row.slices, column);
      counts.set(value, (counts.get(value) ?? 0) + 1);
    }
    return [...counts].map(([value, n]) => [JSON.stringify(value), `${value === null ? "(none)" : value || "(empty)"} (${n})`]);
  }

  function verdictGroups() {
    const counts = new Map();
    for (const row of state.rows) {
      for (const verdict of row.verdicts) counts.set(verdictKey(verdict), (counts.get(verdictKey(verdict)) ?? 0) + 1);
    }
    return data.judges.map((judge, number) => {
      const options = [...counts].filter(([key]) => key.startsWith(`${number} `));
      const title = judge.name + (judge.reliable ? "" : " (unreliable)");
      return [title, options.sort().map(([key, n]) => [key, `${stateWords(key.slice(key.indexOf(" ") + 1))} (${n})`])];
    }).filter(([, options]) => options.length > 0);
  }

  function stateWords(name) {
    if (name.startsWith("win:")) return `chose ${name.slice(4)}`;
    return name === "no_answer" ? "no answer to judge" : name;
  }

  function addFlag(name, n) {
    const box = el("input");
    box.type = "checkbox";
    box.disabled = n === 0;
    flags.set(name, box);
    at("flags").append(el("label", "chip", box, `${name} `, el("span", "n", n.toLocaleString("en"))));
  }

  // ---- the list -----------------------------------------------------------------------------------------------

  function showList() {
    const pages = Math.max(1, Math.ceil(state.found.length / PAGE));
    const shown = state.found.slice(state.page * PAGE, (state.page + 1) * PAGE);
    at("rows").replaceChildren(...shown.map(listItem));
    at("rows").start = state.page * PAGE + 1;
    at("page").textContent = `Page ${state.page + 1} of ${pages}`;
    at("page-back").disabled = state.page === 0;
    at("page-on").disabled = state.page + 1 >= pages;
    if (shown.length === 0) at("rows").append(el("li", "none", "No row fits these filters."));
  }

  function listItem(row) {
    const link = el("a", "", el("span", "id", quote(row.id), row.sample ? ` · sample ${row.sample}` : ""), marks(row));
    link.append(el("span", "title", quote(row.title)));
    link.href = address(row);
    if (row === state.selected) link.setAttribute("aria-current", "true");
    return el("li", "", link);
  }

  /** One mark a run (and turn): right, wrong or not graded, in the run's colour. */
  function marks(row) {
    const box = el("span", "signs");
    for (const answer of row.answers) {
      const run = data.runs[answer.run];
      const grade = run.metric === null ? null : own(answer.grades, run.metric);
      const sign = grade === null ? "·" : grade ? "✓" : "✗";
      const mark = el("span", `sign-of s${run.colour}`, sign);
      mark.setAttribute("role", "img");
      const which = answer.turn === undefined ? run.name : `${run.name}, turn ${answer.turn}`;
      mark.setAttribute("aria-label", `${which}: ${gradeWord(grade)}`);
      mark.title = `${which}: ${gradeWord(grade)}`;
      box.append(mark);
    }
    return box;
  }

  const gradeWord = (grade) => (grade === null ? "not graded" : grade ? "right" : "wrong");

  // ---- one row ------------------------------------------------------------------------------------------------

  function showRow() {
    const row = state.selected;
    if (row === null) return at("row").replaceChildren(el("p", "none", "No row is selected."));
    if (row.answers.some((answer) => answer.turn !== undefined)) return at("row").replaceChildren(rowHead(row), ...turnsOf(row));
    at("row").replaceChildren(
      rowHead(row),
      block("Question", questionOf(row)),
      row.reference === null ? el("p", "muted", "This row has no reference.") : block("Reference", text(row.reference)),
      otherColumns(row),
      el("h4", "", "Answers"),
      el("div", "answers", ...row.answers.map((answer) => answerCard(row, answer))),
      ...(row.verdicts.length > 0 ? [el("h4", "", "Judges"), el("div", "answers", ...row.verdicts.map(verdictCard))] : []),
    );
  }

  /** A row of turns: under each turn what was asked, the answers and what the judges said of them. */
  function turnsOf(row) {
    const turns = [...new Set(row.answers.map((answer) => answer.turn ?? 0))].sort((a, b) => a - b);
    return [otherColumns(row), ...turns.flatMap((turn) => oneTurn(row, turn))];
  }

  function oneTurn(row, turn) {
    const answers = row.answers.filter((answer) => (answer.turn ?? 0) === turn);
    const verdicts = row.verdicts.filter((verdict) => (verdict.turn ?? 0) === turn);
    const reference = own(row.references ?? {}, String(turn));
    return [
      block(turn === 0 ? "Without turns" : `Turn ${turn}`, text(row.prompts[answers[0].prompt].at(-1)[1])),
      ...(reference === null ? [] : [block("Reference", text(reference))]),
      el("div", "answers", ...answers.map((answer) => answerCard(row, answer))),
      ...(verdicts.length > 0 ? [el("h4", "", turn === 0 ? "Judges" : `Judges of turn ${turn}`), el("div", "answers", ...verdicts.map(verdictCard))] : []),
    ];
  }

  function rowHead(row) {
    const title = el("h3", "", quote(row.id));
    title.id = "row-title";
    const where = [];
    if (data.datasets.length > 1) where.push(row.dataset);
    if (state.rows.some((other) => other.sample > 0)) where.push(`sample ${row.sample}`);
    const place = state.found.indexOf(row);
    where.push(place < 0 ? "outside the filters" : `${(place + 1).toLocaleString("en")} of ${state.found.length.toLocaleString("en")}`);
    const steps = el("span", "steps", stepButton("Previous", -1), stepButton("Next", 1));
    return el("header", "", el("div", "", title, el("p", "sub", quote(where.join(" · ")))), steps);
  }

  function stepButton(label, by) {
    const button = el("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => step(by));
    return button;
  }

  const text = (value) => {
    const node = el("div", "text", value);
    node.dir = "auto";
    return node;
  };
  const block = (title, content) => el("section", "block", el("h4", "", title), content);

  function questionOf(row) {
    if (row.prompts.length === 1) return messages(row.prompts[0]);
    return el("div", "", text(row.title), el("p", "sub", "The runs were asked in different words: see the prompt under each answer."));
  }

  function messages(prompt) {
    return el("div", "messages", ...prompt.map(([role, content]) => el("div", "message", el("span", "role", role), text(content))));
  }

  function otherColumns(row) {
    const names = Object.keys(row.fields);
    if (names.length === 0) return document.createDocumentFragment();
    const list = el("dl", "columns");
    for (const name of names) list.append(el("dt", "", quote(name)), el("dd", "", text(row.fields[name])));
    return el("details", "", el("summary", "", `The row's ${plural(names.length, "column")}`), list);
  }

  function answerCard(row, answer) {
    const card = el("section", "answer", el("h5", "", runName(answer.run), grades(answer)));
    card.append(answer.text === null ? el("p", "muted", answer.invalid === "skipped" ? "No answer: the prompt was too long and was skipped." : answer.invalid === "no_earlier_answer" ? "Not asked: an earlier turn has no answer." : `No answer: the row failed (${answer.invalid}).`) : spoken(answer.text));
    const [asked, said] = answer.tokens;
    const extracted = Object.entries(answer.extracted ?? {}).map(([metric, found]) => `${metric} ${found ?? "nothing"}`);
    if (extracted.length > 0) card.append(el("p", "sub", quote(`Read: ${extracted.join(", ")}`)));
    if (answer.probabilities !== undefined) card.append(shares("Probabilities of the labels", answer.probabilities, null));
    if (said !== null) card.append(el("p", "sub", `${plural(asked ?? 0, "token")} in, ${said.toLocaleString("en")} out`));
    if (row.prompts.length > 1) {
      card.append(el("details", "", el("summary", "", "Prompt"), messages(row.prompts[answer.prompt])));
    }
    return card;
  }

  const spoken = (words) => (words === "" ? el("p", "muted", "The answer is empty.") : text(words));

  function grades(answer) {
    const box = el("span", "tags");
    for (const [metric, grade] of Object.entries(answer.grades)) {
      const kind = grade === null ? "" : grade ? "good" : "bad";
      box.append(tag(kind, `${metric}: ${gradeWord(grade)}`));
    }
    if (answer.invalid !== null) box.append(tag("bad", `invalid: ${answer.invalid}`));
    if (answer.truncated) box.append(tag("warn", "truncated"));
    if (answer.cut > 0) box.append(tag("warn", `prompt cut by ${plural(answer.cut, "token")}`));
    return box;
  }

  /** `complaint 62.1 %, praise 17.9 %`; the mass is what all labels have together. */
  function shares(title, probabilities, mass) {
    const percent = (value) => `${(100 * value).toFixed(1)} %`;
    const parts = Object.entries(probabilities).sort((a, b) => b[1] - a[1]).map(([label, value]) => `${label} ${percent(value)}`);
    return el("p", "sub", quote(`${title}: ${parts.join(", ")}${mass === null ? "" : `; all labels together have ${percent(mass)} of the probability`}`));
  }

  function verdictCard(verdict) {
    const judge = data.judges[verdict.judge];
    const head = el("h5", "", quote(judge.name), judge.reliable ? null : tag("bad", "unreliable"));
    const card = el("section", judge.reliable ? "answer" : "answer doubtful", head, el("p", "", verdictWords(verdict)));
    for (const order of verdict.orders) card.append(orderBlock(judge, order));
    return card;
  }

  function verdictWords(verdict) {
    if (verdict.identical) return "The answers are identical: a tie, not asked.";
    if (verdict.state === "no_answer") return "There is no answer to judge.";
    if (verdict.state === "unreadable") return "No verdict: the judge’s words could not be read.";
    if (verdict.disagree) return "The orders disagree: counted as a tie.";
    if (verdict.score !== undefined) return `Score ${Number(verdict.score.toFixed(2))}${String(verdict.score) === verdict.state ? "" : `; the likeliest is ${verdict.state}`}.`;
    if (verdict.run !== null) return `Judged ${verdict.state}.`;
    if (verdict.state === "tie") return "A tie.";
    return `${verdict.orders.length > 1 ? "Both orders chose" : "Chose"} ${verdict.state.slice(4)}.`;
  }

  function orderBlock(judge, order) {
    const box = el("div", "order");
    if (order.first !== undefined) box.append(el("p", "sub", quote(`${order.first} shown first, ${order.second} second`)));
    const meaning = order.choice ?? own(judge.labels, order.label);
    const strong = order.strength === 2 ? ", much better" : "";
    const read = order.label === null ? `nothing read (${order.reason ?? "no reason given"})` : `read ${order.label}`;
    box.append(el("p", "sub", quote(meaning && order.label !== null ? `${read}: ${meaning}${strong}` : read), order.truncated ? tag("warn", "truncated") : null));
    if (order.probabilities !== undefined) box.append(shares("Shares of the labels", order.probabilities, order.label_mass ?? null));
    box.append(order.raw === null ? el("p", "muted", order.reason === "skipped" ? "The judge’s prompt was too long and was skipped." : order.reason === "no_answer" || order.reason === "identical" ? "The judge was not asked." : `The judge’s row failed (${order.reason}).`) : el("blockquote", "", spoken(order.raw)));
    return box;
  }

  // ---- moving about -------------------------------------------------------------------------------------------

  function address(row) {
    const parts = [`row=${encode(row.id)}`];
    if (data.datasets.length > 1) parts.push(`dataset=${encode(row.dataset)}`);
    if (row.sample > 0) parts.push(`sample=${row.sample}`);
    return `#${parts.join("&")}`;
  }

  /** encodeURIComponent throws on half a surrogate pair; those ids are linked to by what they are shown as. */
  const encode = (value) => encodeURIComponent(value.replace(/\p{Surrogate}/gu, "\ufffd"));

  function rowInAddress() {
    const parts = new Map();
    for (const part of location.hash.slice(1).split("&")) {
      const cut = part.indexOf("=");
      if (cut > 0) parts.set(part.slice(0, cut), decode(part.slice(cut + 1)));
    }
    return parts.has("row") ? parts : null;
  }

  function decode(part) {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  }

  const sameRow = (row, parts) =>
    encode(row.id) === encode(parts.get("row")) &&
    (!parts.has("dataset") || row.dataset === parts.get("dataset")) &&
    row.sample === Number(parts.get("sample") ?? 0);

  function followAddress() {
    const parts = rowInAddress();
    if (parts === null) return;
    const row = state.rows.find((candidate) => sameRow(candidate, parts));
    if (row === undefined) return missing(parts.get("row"));
    if (!state.found.includes(row)) at("filters").reset();
    select(row);
    reveal(at("samples"));
    if (window.matchMedia("(max-width: 760px)").matches) at("row").scrollIntoView();
  }

  /** Scroll only when none of it is on the screen, so that a click in the list does not move the page. */
  function reveal(node) {
    const box = node.getBoundingClientRect();
    if (box.bottom < 0 || box.top > window.innerHeight - 80) node.scrollIntoView();
  }

  function missing(id) {
    state.selected = null;
    at("row").replaceChildren(el("p", "note bad", `Row “${id}” is not among the rows on this page.`));
    at("found").textContent = `Row “${id}” is not among the rows on this page.`;
  }

  function select(row) {
    state.selected = row;
    const place = state.found.indexOf(row);
    if (place >= 0) state.page = Math.floor(place / PAGE);
    const focused = at("rows").contains(document.activeElement);
    showList();
    showRow();
    const current = at("rows").querySelector("[aria-current]");
    if (current === null) return;
    keepInView(at("rows"), current);
    if (focused) current.focus({ preventScroll: true });
  }

  /** Scroll the list only, not the page. */
  function keepInView(box, item) {
    const outer = box.getBoundingClientRect();
    const inner = item.getBoundingClientRect();
    if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top;
    if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom;
  }

  function step(by) {
    const place = state.found.indexOf(state.selected);
    const next = state.found[place < 0 ? 0 : place + by];
    if (next === undefined) return;
    select(next);
    history.replaceState(null, "", address(next));
    const number = state.found.indexOf(next) + 1;
    at("found").textContent = `Row ${next.id}, ${number.toLocaleString("en")} of ${state.found.length.toLocaleString("en")}`;
  }

  function onKey(event) {
    const typing = event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") step(1);
    if (event.key === "k") step(-1);
  }

  function turn(by) {
    state.page += by;
    showList();
    at("rows").scrollTop = 0;
  }

  function start() {
    buildFilters();
    at("browser").hidden = false;
    at("filters").addEventListener("input", applyFilters);
    at("filters").addEventListener("submit", (event) => event.preventDefault());
    at("filters").addEventListener("reset", () => setTimeout(applyFilters));
    at("page-back").addEventListener("click", () => turn(-1));
    at("page-on").addEventListener("click", () => turn(1));
    document.addEventListener("keydown", onKey);
    window.addEventListener("hashchange", followAddress);
    state.selected = state.rows[0] ?? null;
    applyFilters();
    showRow();
    followAddress();
  }

  start();
})();
