"""Helm templates from rendered objects: values become expressions, and fields of optional values become conditions.

Marks such as `MARK7X` replace the expressions until the objects are text. Pure: objects in, text out.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from infra.chart.values import Thing, Value, ValuePath, path_of
from infra.generated import plain_yaml

_GROUPS = "RayService/tailrace/spec/rayClusterConfig/workerGroupSpecs"
_LLM = f"{_GROUPS}/1"
_CPUS = '{{{{ include "tailrace.cpus" .Values.{}.resources | quote }}}}'
"""Ray's CPUs of a pod, from its requests."""
_GPU_MOUNT = "{name: kernels, mountPath: /kernels}"
_GPU_VOLUME = "{name: kernels, emptyDir: {sizeLimit: 1Gi}}"

_FIELDS: Mapping[str, str] = {
    "PersistentVolumeClaim/*/spec": (
        "{{- with .Values.storage.className }}\nstorageClassName: {{ . | quote }}\n{{- end }}"
    ),
    "Service/tailrace-doors/metadata": "{{- with .Values.doors.annotations }}\nannotations: {{ toJson . }}\n{{- end }}",
    "ServiceAccount/tailrace/metadata": (
        "{{- with .Values.serviceAccount.annotations }}\nannotations: {{ toJson . }}\n{{- end }}"
    ),
    f"{_LLM}/rayStartParams": '{{- if .Values.llm.gpu }}\nnum-gpus: "1"\n{{- end }}',
    f"{_LLM}/template/spec": '{{- include "tailrace.llm-pod" . | nindent INDENT }}',
    "*/spec": '{{- include "tailrace.pod" . | nindent INDENT }}',
}
"""Additions to an object's fields; the last applies only to pods. The first match is taken."""

_IN_NAMESPACES = (
    "{{{{- range .Values.callers.{} }}}}\n"
    "- namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {{{{ . | quote }}}}}}}}\n{{{{- end }}}}"
)

_ITEMS: Mapping[str, str] = {
    "NetworkPolicy/tailrace-doors/spec/ingress/0/from": _IN_NAMESPACES.format("namespaces")
    + "\n{{- range .Values.callers.cidrs }}\n- ipBlock: {cidr: {{ . | quote }}}\n{{- end }}",
    "NetworkPolicy/tailrace-metrics/spec/ingress/0/from": _IN_NAMESPACES.format("metricsNamespaces"),
    "NetworkPolicy/tailrace-operator/spec/ingress/0/from": _IN_NAMESPACES.format("operatorNamespaces"),
    f"{_LLM}/template/spec/containers/0/volumeMounts": f"{{{{- if .Values.llm.gpu }}}}\n- {_GPU_MOUNT}\n{{{{- end }}}}",
    f"{_LLM}/template/spec/volumes": f"{{{{- if .Values.llm.gpu }}}}\n- {_GPU_VOLUME}\n{{{{- end }}}}",
}
"""Additions to a list."""

_EXPRESSIONS: Mapping[str, str] = {
    f"{_GROUPS}/0/rayStartParams/num-cpus": _CPUS.format("gateway"),
    f"{_GROUPS}/1/rayStartParams/num-cpus": _CPUS.format("llm"),
    f"{_GROUPS}/*/terminationGracePeriodSeconds": '{{ add 45 (include "tailrace.drain-seconds" . | int) }}',
    f"{_GROUPS}/*/preStop/exec/command/2": 'sleep {{ include "tailrace.drain-seconds" . }}; ray stop --grace-period 20',
    "*/metadata/namespace": "{{ .Release.Namespace | quote }}",
    "Namespace/tailrace/metadata/name": "{{ .Release.Namespace | quote }}",
    f"{_LLM}/template/spec/containers/0/image": '{{ include "tailrace.llm-image" . | quote }}',
    "*/image": '{{ include "tailrace.image" . | quote }}',
    "PodDisruptionBudget/tailrace-gateway/spec/minAvailable": "{{ sub (int .Values.gateway.pods.min) 1 }}",
    "NetworkPolicy/tailrace-dependencies/spec/egress/0/ports": (
        '{{- include "tailrace.dependency-ports" . | nindent INDENT }}'
    ),
    "Service/tailrace-doors/spec/ports/0/appProtocol": '{{ ternary "https" "http" (ne .Values.tls.secret "") }}',
    "Service/tailrace-doors/spec/ports/1/appProtocol": (
        '{{ ternary "https" "kubernetes.io/h2c" (ne .Values.tls.secret "") }}'
    ),
    "ConfigMap/tailrace-ray-*/data/RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": (
        "{{ max 1048576 (int64 (default 0 .Values.settings.TAILRACE_MAX_BODY_BYTES)) | quote }}"
    ),
}
"""Fields computed from values. The first match is taken."""

_DOMAIN = re.compile(r"(?<=\.svc\.)cluster\.local\b")
_SERVE_LLM = re.compile(r"- name: llm\n +ray_actor_options:\n( +)num_cpus: .*\n")

_CONDITIONS: Mapping[str, str] = {
    "Namespace": ".Values.namespace.create",
    "PodMonitor": ".Values.monitoring.enabled",
}
"""Values that a kind of object requires."""

_CACHE = "24Gi"
"""The volume for bundles of an object store in the manifests: the cache's limit plus room for bundles in use."""
_CACHE_SIZE = "{{ add (int .Values.bundles.cacheGib) 4 }}Gi"

_PARTS: Mapping[str, str] = {
    "tls": ".Values.tls.secret",
    "keys": ".Values.apiKeys.secret",
    "gcs-ca": ".Values.rayRedis.secret",
    "RAY_REDIS_CA_CERT": ".Values.rayRedis.secret",
}
"""Values that volumes, mounts and variables require, by name."""

_KEYS: Mapping[str, str] = {
    "RayService/tailrace/spec/rayClusterConfig/gcsFaultToleranceOptions/redisPassword": ".Values.rayRedis.secret",
}
"""Values that fields require."""

_OPTIONAL_SETTINGS: Mapping[str, str] = {
    "TAILRACE_API_KEYS_FILE": ".Values.apiKeys.secret",
    "TAILRACE_TLS_DIR": ".Values.tls.secret",
    "TAILRACE_REDIS_USERNAME": ".Values.redis.username",
    "TAILRACE_REDIS_PASSWORD_FILE": ".Values.redis.password",
    "TAILRACE_REDIS_TLS_CA_FILE": ".Values.redis.tls",
    "TAILRACE_KAFKA_USERNAME": ".Values.kafka.username",
    "TAILRACE_KAFKA_PASSWORD_FILE": ".Values.kafka.username",
    "TAILRACE_KAFKA_TLS_CA_FILE": ".Values.kafka.tls",
}
"""Values that settings require."""


def template(things: Iterable[Thing], values: Iterable[Value]) -> str:
    """Return the template of one file's objects."""
    writer = _Writer(tuple(values))
    return "---\n".join(writer.document(thing) for thing in things)


def job_template(cron_job: Thing, spec: Thing, name: str, values: Iterable[Value]) -> str:
    """Return the template of a Job with this CronJob's values; `name` is an expression."""
    writer = _Writer(tuple(values))
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "NAME", "namespace": "tailrace"}}
    text = writer.text("Job/first", head).replace("NAME", name)
    return text + writer.text(f"{path_of(cron_job)}/spec/jobTemplate", {"spec": spec})


def settings_template(config_map: Thing, values: Iterable[Value]) -> str:
    """Return the data lines of the settings ConfigMap."""
    writer = _Writer(tuple(values))
    lines = writer.text(path_of(config_map) + "/data", config_map["data"]).splitlines(keepends=True)
    return "".join(_optional(line) for line in lines)


def _condition_of(item: Any) -> str | None:
    """Return the value that an item of a list requires."""
    if not isinstance(item, dict):
        return None
    if item.get("secret", {}).get("name") == "tailrace-api-keys":
        return _PARTS["keys"]
    return _PARTS.get(item.get("name", "")) if {"mountPath", "secret", "value"} & item.keys() else None


def _optional(line: str) -> str:
    condition = _OPTIONAL_SETTINGS.get(line.partition(":")[0])
    return line if condition is None else f"{{{{- if {condition} }}}}\n{line}{{{{- end }}}}\n"


class _Writer:
    """The objects of one file, with the expressions that their marks represent."""

    def __init__(self, values: tuple[Value, ...]) -> None:
        self._values = values
        self._expressions: list[str] = []

    def document(self, thing: Thing) -> str:
        """Return one object as a template."""
        text = self.text(path_of(thing), thing)
        condition = _CONDITIONS.get(thing["kind"])
        return text if condition is None else f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"

    def text(self, path: str, content: Any) -> str:
        """Return the content at a path as lines."""
        marked = self._marked(path, content)
        lines = plain_yaml(marked).replace("{{", '{{ "{{" }}').splitlines()
        return "".join(f"{self._expanded(line)}\n" for line in lines)

    def _mark(self, expression: str) -> str:
        self._expressions.append(expression)
        return f"MARK{len(self._expressions) - 1}X"

    def _marked(self, path: str, content: Any) -> Any:
        places = [
            (value, value_path)
            for value in self._values
            for value_path in value.places
            if value_path.is_at(path, content)
        ]
        for value, value_path in places:
            content = self._expression(value, value_path, content)
        is_foreign = path.endswith("/image") and not content.startswith("tailrace")
        computed = next((text for at, text in _EXPRESSIONS.items() if fnmatchcase(path, at)), None)
        if computed and not is_foreign:
            return self._mark(computed)
        if isinstance(content, dict):
            fields, conditional = dict[str, Any](), dict[str, Any]()
            for key, entry in content.items():
                inner = {key: self._marked(f"{path}/{key}", entry)}
                condition = _KEYS.get(f"{path}/{key}")
                if condition is None:
                    fields |= inner
                else:
                    conditional |= {self._if(condition): None, **inner, self._end(): None}
            fields |= conditional  # last, because the first field of an item shares its line with the dash
            is_pod = "containers" in content
            added = next(
                (text for at, text in _FIELDS.items() if fnmatchcase(path, at) and (is_pod or at != "*/spec")), None
            )
            return fields if added is None else {**fields, self._mark(added): None}
        if isinstance(content, list):
            items: list[Any] = []
            for index, entry in enumerate(content):
                condition = _condition_of(entry)
                inner = self._marked(f"{path}/{index}", entry)
                if isinstance(entry, str) and (number := re.fullmatch(r"MARK(\d+)X", str(inner))):
                    self._expressions[int(number[1])] = f"- {self._expressions[int(number[1])]}"
                items += [inner] if condition is None else [self._if(condition), inner, self._end()]
            return [*items, self._mark(_ITEMS[path])] if path in _ITEMS else items
        return self._marked_text(content) if isinstance(content, str) else content

    def _expression(self, value: Value, value_path: ValuePath, content: Any) -> Any:
        name = f".Values.{value.name}{' | int' if value.type in {'count', 'port'} else ''}"
        if value_path.part is not None:
            return re.sub(value_path.part, lambda match: match[1] + self._mark(f"{{{{ {name} }}}}"), content, count=1)
        if isinstance(content, dict | list):
            return self._mark(f"{{{{- toYaml {name} | nindent INDENT }}}}")
        return self._mark(f"{{{{ {name} | quote }}}}" if isinstance(content, str) else f"{{{{ {name} }}}}")

    def _if(self, condition: str) -> str:
        return self._mark(f"{{{{- if {condition} }}}}")

    def _end(self) -> str:
        return self._mark("{{- end }}")

    def _marked_text(self, text: str) -> str:
        if text == _CACHE:
            return self._mark(_CACHE_SIZE)
        if name := re.fullmatch(r"tailrace-(settings|ray)-[a-z0-9]{10}", text):
            return self._mark(f'{{{{ include "tailrace.{name[1]}-name" . }}}}')
        if match := _SERVE_LLM.search(text):
            mark = self._mark("{{- if .Values.llm.gpu }}\nnum_gpus: 1\n{{- end }}")
            text = f"{text[: match.end()]}{match[1]}{mark}\n{text[match.end() :]}"
        return _DOMAIN.sub(lambda _: self._mark("{{ .Values.clusterDomain }}"), text)

    def _expanded(self, line: str) -> str:
        """Return a line with its expressions; a line with only a mark becomes the expression's lines."""
        indent = " " * (len(line) - len(line.lstrip()))
        if alone := re.fullmatch(r" *(?:- )?MARK(\d+)X(?:: null)?", line):
            expression = self._expressions[int(alone[1])].replace("INDENT", str(len(indent)))
            return "\n".join(indent + part for part in expression.splitlines())
        if field := re.fullmatch(r"( *(?:- )?)([\w-]+:) MARK(\d+)X", line):
            expression, indent = self._expressions[int(field[3])], " " * len(field[1])
            first, *others = expression.replace("INDENT", str(len(indent) + 2)).splitlines()
            return "\n".join([f"{field[1]}{field[2]} {first}", *(indent + other for other in others)])
        return re.sub(r"MARK(\d+)X", lambda match: self._expressions[int(match[1])], line)
