document.querySelectorAll("svg.figure").forEach(report.prepare);
{
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const { csv, style } = read("figures");
  document.querySelectorAll("main figure").forEach((figure) => report.downloads(figure, csv, style));
  const all = document.getElementById("all-data");
  all.hidden = false;
  all.addEventListener("click", () => {
    const text = document.getElementById("results").textContent;
    report.save(new Blob([text], { type: "application/json" }), "results.json");
  });
}
{
  // Tables: rows open on demand, sort by any column, and are filtered by series and by words.
  const value = (row, column) => {
    const cell = row.rows[0].cells[column];
    const number = cell && cell.querySelector("data");
    return number && number.value !== "" ? +number.value : NaN;
  };
  const open = (body, on) => {
    body.classList.toggle("open", on);
    body.querySelector("button").setAttribute("aria-expanded", on);
  };
  const sorting = (table, heads, bodies) => {
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        // Numbers begin with the largest; names with the order of the study.
        const numbers = head.dataset.sort === "value";
        const first = numbers ? "descending" : "ascending";
        const other = numbers ? "ascending" : "descending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const place = new Map(bodies.map((body, i) => [body, i]));
        // By point: all of the same ranks beside each other.
        const named = heads.slice(0, column).some((each) => each.dataset.sort === "place");
        const text = (body) => body.rows[0].cells[column].textContent;
        const compare = (a, b) => {
          if (!numbers) return (named && text(a).localeCompare(text(b), "en", { numeric: true })) || place.get(a) - place.get(b);
          const [x, y] = [value(a, column), value(b, column)];
          if (Number.isNaN(x) || Number.isNaN(y)) return sign * (Number.isNaN(x) - Number.isNaN(y));
          return x - y;
        };
        [...bodies].sort((a, b) => sign * compare(a, b) || place.get(a) - place.get(b)).forEach((body) => table.append(body));
      });
    });
  };
  const filters = (table, bodies) => {
    const line = document.createElement("p");
    line.className = "filters";
    const [words, which, all, count] = ["input", "select", "button", "span"].map((name) => document.createElement(name));
    words.type = "search";
    words.placeholder = "filter: words of a row";
    words.setAttribute("aria-label", "Rows that have these words");
    which.setAttribute("aria-label", "Rows of this series");
    const names = [...new Set(bodies.map((body) => body.dataset.series))];
    which.append(new Option("all series", "*"), ...names.map((name) => new Option(name || "–", name)));
    which.hidden = names.length < 2;
    count.setAttribute("role", "status");
    const apply = () => {
      const asked = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      bodies.forEach((body) => {
        const names = [...body.querySelectorAll("td.name")].map((cell) => cell.textContent.toLowerCase()).join(" ");
        const text = `${names} ${body.querySelector("tr.says").textContent.toLowerCase()}`;
        const series = which.value === "*" || body.dataset.series === which.value;
        // A number is one of the point's or series' name as a whole; there are too many others.
        const has = (word) => (/^\d+$/.test(word) ? names.split(/\D+/).includes(word) : text.includes(word));
        body.hidden = !(series && asked.every(has));
      });
      const shown = bodies.filter((body) => !body.hidden).length;
      count.textContent = shown === bodies.length ? `${shown} points` : `${shown} of ${bodies.length} points`;
    };
    words.addEventListener("input", apply);
    which.addEventListener("change", apply);
    all.type = "button";
    all.textContent = "open all";
    all.addEventListener("click", () => {
      const on = bodies.some((body) => !body.hidden && !body.classList.contains("open"));
      bodies.forEach((body) => open(body, on && !body.hidden));
      all.textContent = on ? "close all" : "open all";
    });
    line.append(words, which, all, count);
    table.before(line);
    apply();
  };
  document.querySelectorAll("table.points").forEach((table) => {
    const bodies = [...table.tBodies];
    table.classList.add("closed");
    bodies.forEach((body) => {
      const cell = body.querySelector("td.name:not(.series)");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "opens";
      button.append(...cell.childNodes);
      cell.append(button);
      open(body, false);
      body.rows[0].addEventListener("click", () => open(body, !body.classList.contains("open")));
    });
    sorting(table, [...table.tHead.rows[0].cells], bodies);
    if (bodies.length > 6) filters(table, bodies);
  });
}
