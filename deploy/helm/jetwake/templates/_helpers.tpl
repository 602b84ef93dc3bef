{{/* Names. Pods of Deployments are called <name>-<10>-<5> and cut at 63: so names stay short, and hold no dot, which no worker's name may. */}}
{{- define "jetwake.name" -}}
{{- $name := .Release.Name | replace "." "-" | trunc 24 | trimSuffix "-" -}}
{{- if contains "jetwake" $name }}{{ $name }}{{ else }}{{ printf "%s-jetwake" $name | trunc 28 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "jetwake.labels" -}}
{{ include "jetwake.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of pods: nothing that a new version of the chart changes, or it would restart them all. */}}
{{- define "jetwake.podLabels" -}}
{{ include "jetwake.selector" . }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "jetwake.selector" -}}
app.kubernetes.io/name: jetwake
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "jetwake.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "jetwake.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "jetwake.image" -}}
{{ printf "%s:%s" .repository .tag }}
{{- end }}

{{/* The broker. */}}
{{- define "jetwake.natsUrl" -}}
{{- if .Values.nats.own.enabled -}}
nats://{{ include "jetwake.name" . }}-nats:4222
{{- else -}}
{{- required "nats.url: which NATS server or cluster? (or nats.own.enabled=true for one of its own)" .Values.nats.url -}}
{{- end -}}
{{- end }}

{{- define "jetwake.natsMonitoring" -}}
{{- if .Values.nats.monitoring -}}
{{ .Values.nats.monitoring }}
{{- else if .Values.nats.own.enabled -}}
{{ include "jetwake.name" . }}-nats.{{ .Release.Namespace }}.svc:8222
{{- else -}}
{{- fail "nats.monitoring: host:port of the broker's monitoring, which autoscaling reads" -}}
{{- end -}}
{{- end }}

{{/* Ten seconds for what comes after the grace: giving the rest to others, ending the engine. deploy/local.py has the same. */}}
{{- define "jetwake.afterGraceSeconds" -}}10{{- end }}

{{/* role: of the broker's user. */}}
{{- define "jetwake.env" -}}
{{- $top := .top -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: JETWAKE_NATS_URL
  value: {{ include "jetwake.natsUrl" $top | quote }}
{{- with $top.Values.nats.tls }}
{{- if .caSecret }}
- name: JETWAKE_NATS_TLS_CA
  value: /etc/jetwake/nats-ca/ca.crt
{{- end }}
{{- if .clientSecret }}
- name: JETWAKE_NATS_TLS_CERT
  value: /etc/jetwake/nats-client/tls.crt
- name: JETWAKE_NATS_TLS_KEY
  value: /etc/jetwake/nats-client/tls.key
{{- end }}
{{- end }}
{{- if index $top.Values.nats.users .role }}
- name: JETWAKE_NATS_NKEY_FILE
  value: /etc/jetwake/nats-user/{{ eq .role "gateway" | ternary "$(POD_NAME)" .role }}.nk
- name: JETWAKE_NATS_INBOX_PREFIX
  value: _INBOX.{{ .role }}{{ if eq .role "gateway" }}.$(POD_NAME){{ end }}
- name: JETWAKE_NATS_TOPOLOGY
  value: {{ eq .role "router" | ternary "restore" "check" }}
{{- if eq .role "gateway" }}
- name: JETWAKE_NATS_NAME
  value: $(POD_NAME)
{{- if $top.Values.gateway.resumeAnywhere }}
- name: JETWAKE_NATS_PEERS
  value: {{ range $number := until ($top.Values.gateway.replicas | int) }}{{ if $number }},{{ end }}{{ include "jetwake.name" $top }}-gateway-{{ $number }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key, $value := include "jetwake.limits" $top | fromYaml }}
- name: JETWAKE_LIMITS_{{ upper $key }}
  value: {{ $value | int64 | quote }}
{{- end }}
{{- with $top.Values.telemetry.otlpEndpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: OTEL_METRIC_EXPORT_INTERVAL
  value: {{ mul $top.Values.telemetry.pushSeconds 1000 | quote }}
{{- range $key, $value := $top.Values.telemetry.env }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Of roles without an admin port. */}}
{{- define "jetwake.metricsArguments" -}}
{{- with .Values.telemetry.metricsPort }}
- --metrics-host=0.0.0.0
- --metrics-port={{ . }}
{{- end }}
{{- end }}

{{- define "jetwake.metricsPorts" -}}
{{- with .Values.telemetry.metricsPort }}
ports:
  - {name: metrics, containerPort: {{ . }}}
{{- end }}
{{- end }}

{{- define "jetwake.limits" -}}
{{- $own := .Values.nats.own -}}
{{- $limits := deepCopy .Values.limits -}}
{{- if $own.enabled }}{{ $_ := set $limits "replicas" ($own.replicas | int) }}{{ end -}}
{{ toYaml $limits }}
{{- end }}

{{- define "jetwake.natsMounts" -}}
{{- if index .top.Values.nats.users .role }}
- {name: nats-user, mountPath: /etc/jetwake/nats-user, readOnly: true}
{{- end }}
{{- with .top.Values.nats.tls }}
{{- if .caSecret }}
- {name: nats-ca, mountPath: /etc/jetwake/nats-ca, readOnly: true}
{{- end }}
{{- if .clientSecret }}
- {name: nats-client, mountPath: /etc/jetwake/nats-client, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "jetwake.natsVolumes" -}}
{{- with index .top.Values.nats.users .role }}
- {name: nats-user, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .top.Values.nats.tls }}
{{- if .caSecret }}
- {name: nats-ca, secret: {secretName: {{ .caSecret | quote }}}}
{{- end }}
{{- if .clientSecret }}
- {name: nats-client, secret: {secretName: {{ .clientSecret | quote }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- end }}

{{/* Where a process may write: nothing of it is in the image. */}}
{{- define "jetwake.scratchMounts" -}}
- {name: run, mountPath: /run/jetwake}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "jetwake.scratchVolumes" -}}
- {name: run, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- {name: tmp, emptyDir: {}}
{{- end }}

{{- define "jetwake.modelMounts" -}}
- {name: home, mountPath: /var/lib/jetwake}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: {{ .Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "jetwake.modelVolumes" -}}
{{- with .Values.models }}
{{- if .cacheClaim }}
- {name: home, persistentVolumeClaim: {claimName: {{ .cacheClaim | quote }}}}
{{- else }}
- {name: home, emptyDir: {sizeLimit: {{ .cacheSize | quote }}}}
{{- end }}
{{- if .existingClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ .existingClaim | quote }}, readOnly: true}}
{{- end }}
{{- end }}
{{- end }}

{{- define "jetwake.hubEnv" -}}
{{- with .Values.models }}
{{- if .hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .hubTokenSecret | quote }}, key: {{ .hubTokenKey | quote }}}}
{{- end }}
{{- end }}
{{- end }}

{{- define "jetwake.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "jetwake.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* No Kubernetes API for anybody, and no variables of the services around: they would be taken for settings. */}}
{{- define "jetwake.podBasics" -}}
serviceAccountName: {{ include "jetwake.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  {{- include "jetwake.podSecurity" . | nindent 2 }}
{{- end }}

{{- define "jetwake.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Probes of roles without a port. Alive: its event loop turns and its engine makes progress. Ready: it takes work. */}}
{{- define "jetwake.probes" -}}
startupProbe:
  exec: {command: [jetwake, health, --ready]}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ divf . 10 | ceil | int }}
livenessProbe:
  exec: {command: [jetwake, health]}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  exec: {command: [jetwake, health, --ready]}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 1
{{- end }}

{{/* One pool with what it leaves to the defaults. Takes (dict "top" . "pool" pool); gives YAML. */}}
{{- define "jetwake.pool" -}}
{{- mergeOverwrite (deepCopy .top.Values.poolDefaults) (deepCopy .pool) | toYaml -}}
{{- end }}

{{- define "jetwake.model" -}}
{{- required "model: which one? A name on the model hub, or a folder under models.mountPath" .Values.model -}}
{{- end }}
