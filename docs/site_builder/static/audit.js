// The table of "Is your torch wrong?": rows of AUDIT (audit_data.js) that the filters let through.
"use strict";

(() => {
  const DEFECTS = "wxnt";
  const SHORT = ["rr", "fr", "rf", "ff", "3rd"];
  const field = (name) => document.getElementById(`audit-${name}`);
  const state = new URLSearchParams(location.hash.slice(1));

  const option = (select, value, text) => select.add(new Option(text, value));
  const everyVersion = String(AUDIT.versions.length);
  AUDIT.versions.forEach((version, index) => option(field("version"), String(index), version));
  option(field("version"), everyVersion, "all, side by side");
  AUDIT.routes.forEach((route, index) => option(field("route"), String(index), route));
  option(field("verdict"), "defect", "not right");
  option(field("verdict"), "", "any");
  for (const [letter, verdict] of Object.entries(AUDIT.verdicts)) option(field("verdict"), letter, verdict);
  const newest = AUDIT.versions.findIndex((version) => version.startsWith("2.13"));
  field("version").value = String(Math.max(newest, 0));

  const FIELDS = ["name", "version", "route", "verdict", "run"];
  for (const name of FIELDS) if (state.has(name)) field(name).value = state.get(name);

  const matches = (letter, verdict) => !verdict || (verdict === "defect" ? DEFECTS.includes(letter) : letter === verdict);

  function lettersOf(entry, run, route) {
    return route === "" ? entry[run] : entry[run][Number(route)];
  }

  function kept(chosen) {
    const versions = chosen.version === everyVersion ? AUDIT.versions.keys() : [Number(chosen.version)];
    const wanted = chosen.name.toLowerCase().trim();
    const shown = [...versions];
    return Object.entries(AUDIT.operators).filter(
      ([name, entries]) =>
        name.toLowerCase().includes(wanted) &&
        shown.some((index) => entries[index] && [...lettersOf(entries[index], chosen.run, chosen.route)].some((l) => matches(l, chosen.verdict))),
    );
  }

  function cell(tag, text, title) {
    const made = document.createElement(tag);
    made.textContent = text;
    if (title) made.title = title;
    return made;
  }

  function verdictCell(entry, run, route) {
    if (!entry) return cell("td", "not there");
    const letter = entry[run][route];
    const [error, detail] = entry[2][`${run}${route}`] ?? ["", ""];
    const made = cell("td", AUDIT.verdicts[letter], detail);
    made.className = `verdict verdict-${letter === "-" ? "none" : letter}`;
    if (error) made.append(cell("small", ` ${error}`));
    return made;
  }

  function row(name, entries, chosen) {
    const made = document.createElement("tr");
    made.append(cell("th", name));
    const versions = chosen.version === everyVersion ? [...AUDIT.versions.keys()] : [Number(chosen.version)];
    const routes = chosen.route === "" ? [...AUDIT.routes.keys()] : [Number(chosen.route)];
    for (const version of versions) for (const route of routes) made.append(verdictCell(entries[version], chosen.run, route));
    return made;
  }

  function head(chosen) {
    const made = document.createElement("tr");
    made.append(cell("th", "operator"));
    const all = chosen.version === everyVersion;
    const versions = all ? [...AUDIT.versions.keys()] : [Number(chosen.version)];
    const routes = chosen.route === "" ? [...AUDIT.routes.keys()] : [Number(chosen.route)];
    for (const version of versions)
      for (const route of routes)
        made.append(cell("th", all ? `${AUDIT.versions[version]} ${SHORT[route]}` : AUDIT.routes[route], `torch ${AUDIT.versions[version]}, ${AUDIT.routes[route]}`));
    return made;
  }

  function draw() {
    const chosen = Object.fromEntries(FIELDS.map((name) => [name, field(name).value]));
    const rows = kept(chosen);
    const table = document.getElementById("audit");
    table.tHead.replaceChildren(head(chosen));
    table.tBodies[0].replaceChildren(...rows.map(([name, entries]) => row(name, entries, chosen)));
    field("count").textContent = `${rows.length} of ${Object.keys(AUDIT.operators).length} operators`;
    history.replaceState(null, "", `#${new URLSearchParams(Object.entries(chosen).filter(([, value]) => value))}`);
  }

  for (const name of FIELDS) field(name).addEventListener("input", draw);
  draw();
})();
