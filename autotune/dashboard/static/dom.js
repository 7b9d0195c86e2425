// Elements with attributes and children. A child that is text becomes a text node, never markup, whatever is in it.

const SVG = "http://www.w3.org/2000/svg";

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Replaces all children; anything that is null is left out.
export const put = (node, ...children) => node.replaceChildren(...children.filter((child) => child !== null));

// Sets text only where it differs, so that nothing is read out or repainted for nothing.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null).map((child) => child instanceof Node ? child : String(child)));
  return node;
}
