// Asks for what there is to see every two seconds, and puts in place what has changed.
{
  const at = (id) => document.getElementById(id);
  const seen = {};
  let [ended, next] = [false, 0];
  const show = (live) => {
    ended = Boolean(live.ended);
    const share = live.word === "running" && live.share > 0 ? `${Math.floor(100 * live.share)}% · ` : "";
    document.title = `${share}${live.title} · vitesse`;
    at("title").textContent = live.title;
    at("about").textContent = live.about;
    at("state").textContent = live.state;
    document.body.dataset.state = live.word ?? "";
    at("share").value = live.share;
    at("share").hidden = !(live.share > 0);
    at("home").hidden = !live.home;
    at("kind").hidden = Boolean(live.home);
    at("find").hidden = !live.find;
    for (const [id, html] of Object.entries(live.sections)) {
      // Whoever reads a tip, or all settings, goes on reading.
      if (seen[id] === html || at(id).querySelector(".mark.shown, details[open]")) continue;
      seen[id] = html;
      at(id).innerHTML = html;
      at(id).querySelectorAll("svg.figure").forEach(report.prepare);
    }
  };
  const ask = async () => {
    clearTimeout(next);
    try {
      const answer = await fetch(`live.json${location.search}`, { cache: "no-store" });
      const text = await answer.text();
      if (answer.ok) show(JSON.parse(text));
      else at("state").textContent = text.trim();
    } catch (error) {
      // The state of a run that has ended was seen, and stays.
      if (!ended) at("state").textContent = "No answer: the run has ended, or its page was stopped. What was last seen stays here.";
    }
    next = setTimeout(ask, ended ? 10000 : 2000);
  };
  const find = at("find").querySelector("input");
  find.value = new URLSearchParams(location.search).get("q") ?? "";
  find.addEventListener("input", () => {
    history.replaceState(null, "", find.value ? `?q=${encodeURIComponent(find.value)}` : location.pathname);
    clearTimeout(next);
    next = setTimeout(ask, 200);
  });
  ask();
}
