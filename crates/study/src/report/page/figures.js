"use strict";
// Tips over marks by pointer, touch and keyboard, and downloads of what is drawn. Works on whatever figures are in the page when it is called.
const report = (() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const hide = () => {
    tip.classList.remove("on");
    document.querySelectorAll(".mark.shown").forEach((mark) => mark.classList.remove("shown"));
  };
  const show = (mark) => {
    hide();
    tip.textContent = mark.dataset.tip;
    mark.classList.add("shown");
    const at = mark.querySelector(".area").getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    const left = Math.max(12, Math.min(at.left + at.width / 2 - tip.offsetWidth / 2, room - tip.offsetWidth - 12));
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(above > 8 ? above : at.bottom + 8) + scrollY}px`;
    tip.classList.add("on");
  };

  // A page that scrolls under a resting pointer enters marks: that must not hide what the keyboard shows.
  let rested = "";
  const moved = (event) => {
    const [before, now] = [rested, `${event.screenX} ${event.screenY}`];
    rested = now;
    return event.pointerType !== "mouse" || now !== before;
  };
  document.addEventListener("pointermove", moved);

  // The browser's own tips (title) would lie over ours; they are for pages without script.
  const prepare = (svg) => {
    if (svg.dataset.ready) return;
    svg.dataset.ready = "yes";
    svg.source = new XMLSerializer().serializeToString(svg);
    const title = svg.querySelector(":scope > title");
    const desc = svg.querySelector(":scope > desc");
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", title.textContent);
    svg.removeAttribute("aria-labelledby");
    svg.setAttribute("aria-describedby", desc.id);
    title.remove();
    const marks = [...svg.querySelectorAll(".mark")];
    marks.forEach((mark, i) => {
      const own = mark.querySelector("title");
      mark.dataset.tip = own.textContent;
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", own.textContent);
      mark.setAttribute("tabindex", i === 0 ? "0" : "-1");
      own.remove();
      mark.addEventListener("pointerenter", (event) => moved(event) && show(mark));
      mark.addEventListener("pointerleave", (event) => {
        // It leaves them, too.
        if (event.pointerType === "mouse" && mark.classList.contains("shown")) hide();
      });
      mark.addEventListener("focus", () => show(mark));
      mark.addEventListener("blur", hide);
      mark.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        const next = marks[i + step];
        if (event.key === "Escape") hide();
        if (!next) return;
        event.preventDefault();
        mark.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
      });
    });
  };
  document.addEventListener("pointerdown", (event) => event.target.closest(".mark") || hide());

  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  // The figure with its title and note, as a file of its own.
  const alone = (svg, style) => {
    const whole = new DOMParser().parseFromString(svg.source, "image/svg+xml").documentElement;
    const view = svg.dataset.whole.split(" ");
    whole.setAttribute("viewBox", svg.dataset.whole);
    whole.setAttribute("width", view[2]);
    whole.setAttribute("height", view[3]);
    whole.removeAttribute("data-whole");
    whole.removeAttribute("class");
    const names = "http://www.w3.org/2000/svg";
    const paper = document.createElementNS(names, "rect");
    const at = { class: "f-paper", x: view[0], y: view[1], width: view[2], height: view[3] };
    Object.entries(at).forEach(([key, value]) => paper.setAttribute(key, value));
    const own = document.createElementNS(names, "style");
    own.textContent = style;
    whole.prepend(own, paper);
    return { text: new XMLSerializer().serializeToString(whole), width: +view[2], height: +view[3] };
  };
  const png = async (svg, style) => {
    const { text, width, height } = alone(svg, document.getElementById("font").textContent + style);
    const image = new Image();
    const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    try {
      image.src = url;
      await image.decode();
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [2 * width, 2 * height];
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      return await new Promise((done) => canvas.toBlob(done, "image/png"));
    } finally {
      URL.revokeObjectURL(url);
    }
  };

  const downloads = (figure, data, style) => {
    const svg = figure.querySelector("svg.wide");
    const line = document.createElement("p");
    line.className = "downloads";
    const button = (name, act) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = name;
      made.setAttribute("aria-label", `Download “${figure.querySelector("h3").textContent}” as ${name}`);
      made.addEventListener("click", act);
      line.append(made);
    };
    const font = document.getElementById("font").textContent;
    button("SVG", () => save(new Blob([alone(svg, font + style).text], { type: "image/svg+xml" }), `${figure.id}.svg`));
    button("PNG", async () => save(await png(svg, style), `${figure.id}.png`));
    button("CSV", () => save(new Blob([data[figure.id]], { type: "text/csv" }), `${figure.id}.csv`));
    figure.append(line);
  };

  return { prepare, downloads, save };
})();
