{{/*
Names and labels. What is longer than 36 letters is cut and gets a hash of the whole, so that two releases never share
a name; hosts are called NAME-REVISION-worker-N, which stays below the 63 characters of a label.
*/}}

{{- define "bascule.name" -}}
{{- $name := printf "%s-bascule" .Release.Name -}}
{{- if gt (len $name) 36 -}}
{{- $name = printf "%s-%s" ($name | trunc 27 | trimAll "-.") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/*
The name of what a revision makes. An upgrade thus makes everything anew, and helm takes the old away: a Job cannot be
changed, and a StatefulSet would replace its hosts one by one below a job that runs on them already. `helm template`,
and with it Argo CD, knows revision 1 alone (docs/kubernetes.md says what to do there).
*/}}
{{- define "bascule.revisionName" -}}
{{- include "bascule.name" . }}-{{ .Release.Revision -}}
{{- end -}}

{{/* Where both are given, Kubernetes pulls by the digest, and the tag is for people. */}}
{{- define "bascule.image" -}}
{{- with .Values.image -}}
{{- .repository -}}{{- with .tag }}:{{ . }}{{ end -}}{{- with .digest }}@{{ . }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* What a selector selects by: the pods of one revision. Takes (dict "root" $ "component" "worker"). */}}
{{- define "bascule.selector" -}}
app.kubernetes.io/name: bascule
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
bascule.revision: {{ .root.Release.Revision | quote }}
{{- end -}}

{{- define "bascule.labels" -}}
{{ include "bascule.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}
