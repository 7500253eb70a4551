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

{{/* warmpath.yaml: what the chart sets, and the values' own over it. */}}
{{- define "warmpath.config" -}}
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
{{- $_ := set $config "replicas" (dict "service" (printf "%s-replicas:9006" (include "warmpath.picker" .))) }}
{{- $_ := set $config "drainDelay" $drainDelay }}
{{- $_ := set $config "drain" "60s" }}
{{- mustMergeOverwrite $config (deepCopy .Values.config) | toYaml }}
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
- name: picker
  image: {{ include "warmpath.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if eq .Values.mode "standalone" }}
  restartPolicy: Always  # a sidecar: starts before Envoy, ends after it
  {{- end }}
  args: [pick, --config, /etc/warmpath/warmpath.yaml]
  ports:
  - {name: grpc, containerPort: 9002}
  - {name: health, containerPort: 9003}
  - {name: replica, containerPort: 9006}
  - {name: admin, containerPort: 9090}
  startupProbe:
    grpc: {port: 9003, service: liveness}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    grpc: {port: 9003, service: liveness}
    periodSeconds: 10
  readinessProbe:
    grpc: {port: 9003, service: readiness}
    periodSeconds: 2
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    {{- include "warmpath.hardened" . | nindent 4 }}
  volumeMounts:
  - {name: config, mountPath: /etc/warmpath, readOnly: true}
  - {name: cache, mountPath: /var/cache/warmpath}
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.certificateSecret }}
  - {name: tls, mountPath: /etc/warmpath-tls, readOnly: true}
  {{- end }}
{{- end }}
