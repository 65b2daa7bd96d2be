// What the service's words mean, in plain ones. Knows no element and no request.

export const TIERS = ["precomputed", "llm", "student", "popular"]

export const TIER_NAMES = {
  precomputed: "Stored list",
  llm: "Language model",
  student: "Student",
  popular: "Popular",
}

export const TIER_STORIES = {
  precomputed: "A list made offline, waiting in the feature store. Used while nothing newer is known of the user.",
  llm: "The decoder spells the next items from the history. Asked when its predicted finish fits the deadline.",
  student: "A small model distilled from it, in the gateway itself, ready in well under a millisecond. Always computed, so a late language model costs nothing.",
  popular: "What everyone likes lately, held in memory. Needs no network and cannot fail.",
}

const REASONS = {
  precomputed_fresh: "Nothing has happened since this list was stored, so it is still right.",
  llm_in_time: "The language model fitted into the deadline.",
  unknown_user: "Nobody knows this visitor yet, so everybody’s favourites answer.",
  short_history: "The history is too short for the language model to be worth its time.",
  llm_overloaded: "The language model has its hands full; nobody waits for it.",
  llm_too_slow: "The language model would not have made the deadline, so it was not asked.",
  llm_late: "The language model ran out of time; the student’s answer lay ready.",
  llm_away: "The language model is away; the student answers in its place.",
  llm_failed: "The language model stumbled; the student answers in its place.",
  bundle_mismatch: "The language model serves another bundle just now.",
  features_away: "The feature store is away, so the history is unknown; favourites answer.",
  student_failed: "The student could not rank; favourites answer.",
  shed: "Too much is asked at once; calls that matter less get the cheapest good answer.",
  everything_seen: "The visitor has seen everything, so seen items are shown again.",
  nothing_allowed: "The filters leave nothing to show.",
}

export const reasonInWords = (reason) => REASONS[reason] ?? reason.replaceAll("_", " ")

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–"
  if (ms < 10) return `${ms.toFixed(1)} ms`
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(0)} s`
}

// A share such as 0.9987 with as many digits as tell it from 100 %.
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
