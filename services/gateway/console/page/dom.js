// DOM helpers. Text is set as text: nothing here parses HTML.

export const byId = (id) => document.getElementById(id)

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value
    else if (name === "data") Object.assign(element.dataset, value)
    else if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value)
    else element[name] = value
  }
  element.append(...children.filter((child) => child !== null && child !== undefined))
  return element
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text
}

// A failed call as a sentence: the failure, its cause, and the fix.
export function failureText(error, what) {
  if (error.status === 401) return "A key is needed."
  if (error.status === 403) return `${error.message}.`
  return `${what}: ${[error.field, error.message].filter(Boolean).join(": ")}${error.fix ? `; ${error.fix}` : ""}.`
}

// Announces a sentence to screen readers, after a pause in which a newer one may replace it.
let pending = 0
export function announce(sentence) {
  clearTimeout(pending)
  pending = setTimeout(() => setText(byId("live"), sentence), 120)
}

export const prefersReducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches
