"""The page at /docs: reads /openapi.json and shows it, with no script or style from anywhere else."""

DOCS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Tailrace API</title>
<link rel="icon" href="/console/page/mark.svg" type="image/svg+xml">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 13px/1.4 ui-monospace, monospace; background: #f3f4f6 }
pre { padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer }
</style>
<h1>Tailrace API</h1>
<p>Machine-readable: <a href="openapi.json">openapi.json</a>. The same calls over gRPC: <code>tailrace.v1.Recommender</code>.</p>
<main></main>
<h2>Schemas</h2>
<section></section>
<script>
const add = (parent, tag, text) => {
  const element = document.createElement(tag)
  element.textContent = text
  parent.append(element)
  return element
}
const addJson = (parent, title, value) => {
  const details = add(parent, "details", "")
  add(details, "summary", title)
  add(details, "pre", JSON.stringify(value, null, 2))
}
fetch("openapi.json").then(answer => answer.json()).then(spec => {
  const main = document.querySelector("main")
  for (const [path, methods] of Object.entries(spec.paths))
    for (const [method, route] of Object.entries(methods)) {
      add(main, "h2", method.toUpperCase() + " " + path)
      add(main, "p", route.description || route.summary || "")
      const examples = route.requestBody?.content["application/json"].examples ?? {}
      for (const example of Object.values(examples)) {
        const body = JSON.stringify(example.value)
        add(main, "pre", "curl -s " + location.origin + path + " -H 'content-type: application/json' -d '" + body + "'")
      }
      if (route.parameters) addJson(main, "parameters", route.parameters)
      if (route.requestBody) addJson(main, "request", route.requestBody.content["application/json"].schema)
      addJson(main, "answers", route.responses)
    }
  for (const [name, schema] of Object.entries(spec.components.schemas))
    addJson(document.querySelector("section"), name, schema)
})
</script>
</html>
"""
