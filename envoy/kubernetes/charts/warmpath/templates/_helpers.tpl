{{/* The pool's name, and what is made of it. */}}
{{- define "warmpath.picker" -}}
{{ .Release.Name }}-picker
{{- end }}

{{/* By which the picker's pods are found; never changes in a release's life. */}}
{{- define "warmpath.selector" -}}
app.kubernetes.io/name: warmpath
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: picker
{{- end }}

{{- define "warmpath.labels" -}}
{{ include "warmpath.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "warmpath.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The picker's ports as the config has them, and Envoy's, which is `http`. */}}
{{- define "warmpath.ports" -}}
{{- range $name, $usual := dict "grpc" 9002 "health" 9003 "replica" 9006 "admin" 9090 }}
{{ $name }}: {{ dig "listen" $name $usual $.Values.config | int }}
{{- end }}
http: {{ dig "envoy" "listen" 8080 .Values.config | int }}
{{- end }}

{{/* warmpath.yaml: what the chart sets, and the values' own over it. */}}
{{- define "warmpath.config" -}}
{{- $ports := include "warmpath.ports" . | fromYaml }}
{{- $kubernetes := dict "pool" .Release.Name }}
{{- $listen := dict "host" "0.0.0.0" "tls" (dict "mode" "selfSigned") }}
{{- $drainDelay := "10s" }}
{{- $config := dict }}
{{- if .Values.certificateSecret }}
{{- $_ := set $listen "tls" (dict "mode" "files" "certificate" "/etc/warmpath-tls/tls.crt" "key" "/etc/warmpath-tls/tls.key") }}
{{- end }}
{{- if eq .Values.mode "standalone" }}
{{- $kubernetes = dict "selector" .Values.pool.selector "targetPorts" .Values.pool.targetPorts }}
{{- $listen = dict "host" "0.0.0.0" }}
{{- $drainDelay = "1s" }}
{{- $_ := set $config "envoy" (dict "host" "0.0.0.0" "listen" 8080 "profile" .Values.envoy.profile) }}
{{- with .Values.objectives }}
{{- $_ := set $config "flow" (dict "objectives" .) }}
{{- end }}
{{- end }}
{{- $_ := set $config "listen" $listen }}
{{- $_ := set $config "pool" (dict "name" .Release.Name "kubernetes" $kubernetes) }}
{{- $_ := set $config "prefix" (dict "mode" "events") }}
{{- $_ := set $config "replicas" (dict "service" (printf "%s-replicas:%v" (include "warmpath.picker" .) $ports.replica) "secret" "/etc/warmpath-replicas/secret") }}
{{- $_ := set $config "drainDelay" $drainDelay }}
{{- $_ := set $config "drain" "60s" }}
{{- mustMergeOverwrite $config (deepCopy .Values.config) | toYaml }}
{{- end }}

{{/* Seconds of a duration as the config has it: 60, `500ms`, `60s`, `10m`, `1h`. */}}
{{- define "warmpath.seconds" -}}
{{- $units := dict "" 1 "ms" 0.001 "s" 1 "m" 60 "h" 3600 }}
{{- mulf (toString . | regexFind "^[0-9.]+") (toString . | regexFind "[a-z]*$" | get $units) }}
{{- end }}

{{/* For all objects: what the schema cannot refuse. */}}
{{- define "warmpath.check" -}}
{{- $config := include "warmpath.config" . | fromYaml }}
{{- $needed := addf (include "warmpath.seconds" $config.drainDelay) (include "warmpath.seconds" $config.drain) 10 | ceil | int }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$" .Release.Name) }}
{{- fail "the release's name must be a letter and up to 46 of a-z, 0-9 and -, for Services are named after it" }}
{{- end }}
{{- if and (dig "quota" "enabled" false $config) (not (dig "quota" "store" "" $config | hasPrefix "redis")) }}
{{- fail "config.quota.store must be Redis, as redis://HOST:6379/0: pickers share it, and write no files" }}
{{- end }}
{{- if and .Values.podMonitor.create (include "warmpath.reviews" .) (not .Values.podMonitor.tokenSecret) }}
{{- fail "podMonitor.tokenSecret must name a Secret with a `token`: config.listen.metricsAuth asks whoever scrapes for one" }}
{{- end }}
{{- if lt (int .Values.terminationGracePeriodSeconds) $needed }}
{{- fail (printf "terminationGracePeriodSeconds must be %d or more: config.drainDelay, config.drain and 10 s to end" $needed) }}
{{- end }}
{{- end }}

{{/* Whether one picker leads, and whether metrics are for those with a token: as the config says. */}}
{{- define "warmpath.elects" -}}
{{- if dig "leaderElection" "enabled" false .Values.config }}yes{{ end }}
{{- end }}
{{- define "warmpath.reviews" -}}
{{- if eq (dig "listen" "metricsAuth" "none" .Values.config) "tokenReview" }}yes{{ end }}
{{- end }}

{{- define "warmpath.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The picker's container: alone in its pod, or a sidecar of Envoy. */}}
{{- define "warmpath.container" -}}
{{- $ports := include "warmpath.ports" . | fromYaml -}}
- name: picker
  image: {{ include "warmpath.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if eq .Values.mode "standalone" }}
  restartPolicy: Always  # a sidecar: starts before Envoy, ends after it
  {{- end }}
  args: [pick, --config, /etc/warmpath/warmpath.yaml]
  ports:
  - {name: grpc, containerPort: {{ $ports.grpc }}}
  - {name: health, containerPort: {{ $ports.health }}}
  - {name: replica, containerPort: {{ $ports.replica }}}
  - {name: admin, containerPort: {{ $ports.admin }}}
  startupProbe:
    grpc: {port: {{ $ports.health }}, service: liveness}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    grpc: {port: {{ $ports.health }}, service: liveness}
    periodSeconds: 10
  readinessProbe:
    grpc: {port: {{ $ports.health }}, service: readiness}
    periodSeconds: 2
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    {{- include "warmpath.hardened" . | nindent 4 }}
  volumeMounts:
  - {name: config, mountPath: /etc/warmpath, readOnly: true}
  - {name: replicas, mountPath: /etc/warmpath-replicas, readOnly: true}
  - {name: cache, mountPath: /var/cache/warmpath}
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.certificateSecret }}
  - {name: tls, mountPath: /etc/warmpath-tls, readOnly: true}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
