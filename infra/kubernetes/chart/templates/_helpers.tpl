{{/* Written by hand: what the generated templates include. */}}

{{- define "tailrace.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}
{{- end }}

{{- define "tailrace.llm-image" -}}
{{- if .Values.llm.imageTag -}}
{{ .Values.image.repository }}:{{ .Values.llm.imageTag }}
{{- else -}}
{{ include "tailrace.image" . }}
{{- end -}}
{{- end }}

{{/* What values add to every pod. */}}
{{- define "tailrace.pod" -}}
{{- include "tailrace.pod-with" (list . .Values.tolerations) }}
{{- end }}

{{- define "tailrace.llm-pod" -}}
{{- $gpu := dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule" -}}
{{- include "tailrace.pod-with" (list . (ternary (append .Values.tolerations $gpu) .Values.tolerations .Values.llm.gpu)) }}
{{- end }}

{{- define "tailrace.pod-with" -}}
{{- $root := first . }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with $root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with last . }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/* The ConfigMaps are named by their content as Kustomize does it, so that a changed one is a changed pod. */}}
{{- define "tailrace.hash" -}}
{{- dict "kind" "ConfigMap" "name" "" "data" . | toJson | sha256sum | trunc 10 | replace "0" "g" | replace "1" "h" | replace "3" "k" | replace "a" "m" | replace "e" "t" -}}
{{- end }}

{{- define "tailrace.settings" -}}
{{- $all := include "tailrace.settings-data" . | fromYaml }}
{{- range $name, $value := .Values.settings }}
{{- $is_whole := and (kindIs "float64" $value) (eq (toString $value) (toString (floor $value))) }}
{{- $_ := set $all $name (ternary (int64 $value | toString) (tpl (toString $value) $) $is_whole) }}
{{- end }}
{{- toYaml $all -}}
{{- end }}

{{- define "tailrace.settings-name" -}}
tailrace-settings-{{ include "tailrace.hash" (include "tailrace.settings" . | fromYaml) }}
{{- end }}

{{- define "tailrace.ray-name" -}}
tailrace-ray-{{ include "tailrace.hash" (include "tailrace.ray-data" . | fromYaml) }}
{{- end }}

{{/* Ports that pods may call: those of the addresses among the values, and dependencyPorts. */}}
{{- define "tailrace.dependency-ports" -}}
{{- $ports := list (int .Values.redis.port) }}
{{- range splitList "," .Values.kafka.bootstrap }}{{ $ports = append $ports (splitList ":" . | last | int) }}{{ end }}
{{- $ports = append $ports (splitList ":" .Values.rayRedis.address | last | int) }}
{{- range list .Values.traces.endpoint .Values.settings.TAILRACE_TEXT_URL .Values.settings.TAILRACE_LLM_URL }}
{{- if . }}
{{- $host := (urlParse .).host }}
{{- $ports = append $ports (ternary (splitList ":" $host | last | int) (ternary 443 80 (hasPrefix "https:" .)) (regexMatch ":[0-9]+$" $host)) }}
{{- end }}
{{- end }}
{{- $sorted := list }}
{{- range concat $ports .Values.dependencyPorts }}{{ $sorted = append $sorted (printf "%05d" (int .)) }}{{ end }}
{{- range $sorted | uniq | sortAlpha }}
- {port: {{ trimPrefix "0" (trimPrefix "0" (trimPrefix "0" (trimPrefix "0" .))) }}, protocol: TCP}
{{- end }}
{{- end }}

{{/* Ray's CPUs of a pod: the whole CPUs that it requests, at least 4. Pods have no CPU limit, so a trial requests fewer. */}}
{{- define "tailrace.cpus" -}}
{{- $cpu := dig "requests" "cpu" 1 . | toString }}
{{- if hasSuffix "m" $cpu }}{{ max 4 (div (trimSuffix "m" $cpu | int) 1000) }}{{ else }}{{ max 4 (floor (float64 $cpu) | int) }}{{ end }}
{{- end }}

{{/* Seconds that a pod of Ray answers after its end was asked for: 15, or the deadline of texts. */}}
{{- define "tailrace.drain-seconds" -}}
{{- $milliseconds := 0 }}
{{- with .Values.settings }}
{{- if or .TAILRACE_TEXT_PATH .TAILRACE_TEXT_URL }}{{ $milliseconds = int (default 60000 .TAILRACE_TEXT_DEADLINE_MS) }}{{ end }}
{{- end }}
{{- max 15 (div (add $milliseconds 999) 1000) }}
{{- end }}

{{/* A changed Job is another Job, since Kubernetes changes none. */}}
{{- define "tailrace.first-hash" -}}
{{- list (include "tailrace.image" .) .Values.train (include "tailrace.settings-name" .) | toJson | sha256sum | trunc 10 }}
{{- end }}

{{/* What the schema cannot say, because two values are in it. */}}
{{- define "tailrace.check" -}}
{{- with .Values }}
{{- if gt (int .gateway.pods.min) (int .gateway.pods.max) }}{{ fail "gateway.pods.min: more than gateway.pods.max; lower it" }}{{ end }}
{{- if gt (int .llm.pods.min) (int .llm.pods.max) }}{{ fail "llm.pods.min: more than llm.pods.max; lower it" }}{{ end }}
{{- if gt (int .gateway.replicas.min) (int .gateway.replicas.max) }}{{ fail "gateway.replicas.min: more than gateway.replicas.max; lower it" }}{{ end }}
{{- if gt (int .llm.replicas.min) (int .llm.replicas.max) }}{{ fail "llm.replicas.min: more than llm.replicas.max; lower it" }}{{ end }}
{{- if lt (int .gateway.replicas.min) (int .gateway.pods.min) }}{{ fail "gateway.replicas.min: less than gateway.pods.min, so that a pod would have no gateway and never be ready; raise it" }}{{ end }}
{{- if lt (int .llm.replicas.min) (int .llm.pods.min) }}{{ fail "llm.replicas.min: less than llm.pods.min, so that a pod would have no replica and never be ready; raise it" }}{{ end }}
{{- if gt (int .stream.workers) (int .kafka.partitions) }}{{ fail "stream.workers: more than kafka.partitions, so that some would have nothing to do; lower it" }}{{ end }}
{{- if and (ne .doors.serviceType "ClusterIP") (not .callers.cidrs) }}{{ fail "callers.cidrs: empty, so that our NetworkPolicy denies every caller of the doors' LoadBalancer or NodePort; name their networks, or 0.0.0.0/0" }}{{ end }}
{{- $cpus := add (mul (include "tailrace.cpus" .gateway.resources | int) (int .gateway.pods.max)) (mul (include "tailrace.cpus" .llm.resources | int) (int .llm.pods.max)) }}
{{- if gt (add (int .gateway.replicas.max) (mul 2 (int .llm.replicas.max)) | int) (int $cpus) }}{{ fail (printf "gateway.replicas.max: with 2 CPUs for each of llm.replicas.max more than the %d of gateway.pods.max and llm.pods.max; raise the pods or their resources.requests.cpu" $cpus) }}{{ end }}
{{- if and (not .apiKeys.secret) (not .settings.TAILRACE_ALLOW_ANONYMOUS) }}{{ fail "apiKeys.secret: empty; name the Secret, or set settings.TAILRACE_ALLOW_ANONYMOUS" }}{{ end }}
{{- if and .ingress.enabled (not .ingress.host) }}{{ fail "ingress.host: empty; name the host of REST, or set ingress.enabled to false" }}{{ end }}
{{- if and .ingress.enabled (eq .ingress.host .ingress.grpcHost) }}{{ fail "ingress.grpcHost: the same as ingress.host, whose Ingress has every path; give gRPC a host of its own" }}{{ end }}
{{- end }}
{{- end }}
