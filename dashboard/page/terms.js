/* The glossary: each term on the page is a button that shows its explanation on hover and on focus. Screen readers read
   the explanation from the list of terms, which is why the tip itself is hidden from them. */
import { make } from "./text.js";

const tip = document.getElementById("tip");

export const term = (name, ...children) =>
  make("button", { type: "button", class: "term", "aria-describedby": `term-${name}` }, ...children);

function show(target) {
  const at = target.closest?.(".term");
  if (!at) { tip.hidden = target !== tip; return; }
  tip.textContent = document.getElementById(at.getAttribute("aria-describedby")).textContent;
  tip.hidden = false;
  const box = at.getBoundingClientRect(), below = box.bottom + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? box.bottom : box.top - tip.offsetHeight}px`;
}

for (const each of document.querySelectorAll("[data-term]")) each.replaceChildren(term(each.dataset.term, each.textContent));
for (const kind of ["mouseover", "focusin", "click"]) document.addEventListener(kind, (event) => show(event.target));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
for (const kind of ["scroll", "focusout"]) document.addEventListener(kind, () => { tip.hidden = true; }, true);
