{{/*
Names and labels. What is longer than 36 letters is cut and gets a hash of the whole, so that two releases never share
a name; hosts are called NAME-RUN-worker-N at most, which stays below the 63 characters of a label.
*/}}

{{- define "bascule.name" -}}
{{- $name := printf "%s-bascule" .Release.Name -}}
{{- if gt (len $name) 36 -}}
{{- $name = printf "%s-%s" ($name | trunc 27 | trimAll "-.") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/*
Which run of the release this is: an 8-character hash of the values and the chart's version. A Job cannot be changed, so
other values make another Job, and whoever installed the old one (helm, Argo CD, kustomize with pruning) removes it. The
same values make the same objects, however often they are rendered.
*/}}
{{- define "bascule.run" -}}
{{- printf "%s\n%s" .Chart.Version (toYaml .Values) | sha256sum | trunc 8 -}}
{{- end -}}

{{- define "bascule.runName" -}}
{{- include "bascule.name" . }}-{{ include "bascule.run" . -}}
{{- end -}}

{{/* Where both are given, Kubernetes pulls by the digest, and the tag is for people. */}}
{{- define "bascule.image" -}}
{{- with .Values.image -}}
{{- .repository -}}{{- with .tag }}:{{ . }}{{ end -}}{{- with .digest }}@{{ . }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* What a selector selects by: the pods of one run. Takes (dict "root" $ "component" "worker"). */}}
{{- define "bascule.selector" -}}
app.kubernetes.io/name: bascule
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
bascule.run: {{ include "bascule.run" .root | quote }}
{{- end -}}

{{- define "bascule.labels" -}}
{{ include "bascule.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* The labels of a Job or MPIJob, by which Kueue, for one, finds it. */}}
{{- define "bascule.jobLabels" -}}
{{ include "bascule.labels" . }}
{{- with .root.Values.jobLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* How often a job is begun again, and when it ends at the latest and goes: fields of a Job and of an MPIJob's runPolicy. */}}
{{- define "bascule.policy" -}}
backoffLimit: {{ .Values.retries }}
{{- with .Values.deadlineSeconds }}
activeDeadlineSeconds: {{ . }}
{{- end }}
{{- if ne .Values.ttlSecondsAfterFinished nil }}
ttlSecondsAfterFinished: {{ .Values.ttlSecondsAfterFinished }}
{{- end }}
{{- end -}}
