// The colour theme: light, dark, or the system's. Kept in local storage.

import { byId } from "./dom.js"

const KEY = "tailrace-theme"
const NEXT = { auto: "light", light: "dark", dark: "auto" }
const NAMES = { auto: "Auto", light: "Light", dark: "Dark" }

export const themeChanged = new EventTarget()

function show(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme
  else document.documentElement.dataset.theme = theme
  const button = byId("theme-button")
  button.textContent = NAMES[theme]
  button.setAttribute("aria-label", `Theme: ${theme === "auto" ? "system" : theme}`)
  themeChanged.dispatchEvent(new Event("changed"))
}

const stored = () => (localStorage.getItem(KEY) in NEXT ? localStorage.getItem(KEY) : "auto")

export function nextTheme() {
  const theme = NEXT[stored()]
  localStorage.setItem(KEY, theme)
  show(theme)
}

export function startTheme() {
  show(stored())
  byId("theme-button").addEventListener("click", nextTheme)
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => themeChanged.dispatchEvent(new Event("changed")))
}
