// Texts and number formats of the page. Knows no elements or requests; tiers and reasons come from the service's table.

import { REASONS, TIER_TEXTS } from "./reasons.js"

export const TIERS = Object.keys(TIER_TEXTS)
export const tierTitle = (tier) => TIER_TEXTS[tier]?.title ?? tier
export const tierMeaning = (tier) => TIER_TEXTS[tier].meaning
export const reasonText = (reason) => REASONS[reason] ?? reason.replaceAll("_", " ")

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–"
  if (ms < 10) return `${ms.toFixed(1)} ms`
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(0)} s`
}

// What was read of a wish; null if it was not read.
export function understoodText(understood) {
  if (!understood) return "The wish was not read; titles were searched."
  const { must, must_not, liked, relaxed } = understood
  const parts = [must.join(", "), must_not.length ? `not ${must_not.join(", ")}` : "", liked.length ? `like ${liked.join(", ")}` : ""]
  const read = parts.filter(Boolean).join("; ")
  const limits = relaxed.length ? " Nothing is left without them, so the exclusions are not applied." : ""
  return read ? `Understood: ${read}.${limits}` : "No value of the catalogue was named; words and titles decide."
}

// A share such as 0.9987, with enough digits to differ from 100 %.
export function percent(share) {
  if (share === null || share === undefined) return "–"
  if (share === 1) return "100\u00a0%"
  const digits = share > 0.999 ? 3 : share > 0.99 ? 2 : 1
  return `${Math.min(100 * share, 100 - 10 ** -digits).toFixed(digits)}\u00a0%`
}

export function ago(ms, now = Date.now()) {
  const seconds = (now - ms) / 1000
  if (seconds < 5) return "just now"
  if (seconds < 60) return `${Math.round(seconds)} s ago`
  if (seconds < 3_600) return `${Math.round(seconds / 60)} min ago`
  if (seconds < 86_400) return `${Math.round(seconds / 3_600)} h ago`
  return new Date(ms).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })
}

export function score(value) {
  const size = Math.abs(value)
  if (size >= 100) return value.toFixed(0)
  return value.toFixed(size >= 1 ? 2 : size >= 0.01 ? 3 : 4).replace("-", "−")
}
