{{/* Names and labels. Hosts are called NAME-worker-N, so the name leaves room below the 63 characters of a label. */}}

{{- define "bascule.name" -}}
{{- printf "%s-bascule" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "bascule.image" -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag -}}
{{- end -}}

{{/* What a selector selects by: it never changes from version to version. Takes (dict "root" $ "component" "worker"). */}}
{{- define "bascule.selector" -}}
app.kubernetes.io/name: bascule
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "bascule.labels" -}}
{{ include "bascule.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}
