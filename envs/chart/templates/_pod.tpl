{{/*
A pod's metadata and spec, the same for every part of a job. Takes a dict:
  root       the chart's context
  component  trainer (the one pod without DDL), worker (a host), launcher or test
  hosts      whether it logs in to the job's hosts, or is one
  args       the container's arguments, after the image's entry point
  gpus       how many GPUs it takes
  resources  limits and requests
  restart    the restart policy
*/}}
{{- define "bascule.podTemplate" -}}
metadata:
  labels:
    {{- include "bascule.labels" . | nindent 4 }}
    {{- with .root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .root.Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "bascule.podSpec" . | nindent 2 }}
{{- end -}}

{{- define "bascule.podSpec" -}}
{{- $values := .root.Values -}}
{{- $host := eq .component "worker" -}}
{{- $key := and .hosts (eq $values.mode "plain") -}}
restartPolicy: {{ .restart }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- if and .hosts $values.ddl.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
terminationGracePeriodSeconds: 10
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
containers:
  - name: {{ .component }}
    image: {{ include "bascule.image" .root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args:
      {{- toYaml .args | nindent 6 }}
    workingDir: {{ if include "bascule.claim" .root }}{{ $values.data.mountPath }}{{ else }}/home/bascule{{ end }}
    {{- if or .hosts $values.env }}
    env:
      {{- if .hosts }}
      - name: BASCULE_SSH_PORT
        value: {{ $values.ddl.sshPort | quote }}
      - name: BASCULE_WAIT_SECONDS
        value: {{ $values.ddl.waitSeconds | quote }}
      # Open MPI would cut the hosts' names at the first dot, and Kubernetes finds them by the whole name only.
      - name: PRTE_MCA_prte_keep_fqdn_hostnames
        value: "true"
      - name: OMPI_MCA_orte_keep_fqdn_hostnames
        value: "true"
      {{- end }}
      {{- with $values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
    {{- if $host }}
    ports:
      - name: ssh
        containerPort: {{ $values.ddl.sshPort }}
    readinessProbe:
      tcpSocket:
        port: ssh
      periodSeconds: 5
    {{- end }}
    resources:
      {{- include "bascule.resources" . | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    volumeMounts:
      # All that a program may write; the image itself stays as it is.
      - name: scratch
        mountPath: /tmp
        subPath: tmp
      - name: scratch
        mountPath: /home/bascule
        subPath: home
      - name: run
        mountPath: /run/bascule
      - name: shared-memory
        mountPath: /dev/shm
      {{- if include "bascule.claim" .root }}
      - name: data
        mountPath: {{ $values.data.mountPath }}
      {{- end }}
      {{- if $key }}
      - name: ssh-key
        mountPath: /etc/bascule/ssh
        readOnly: true
      {{- if not $host }}
      - name: hosts
        mountPath: /etc/mpi
        readOnly: true
      {{- end }}
      {{- end }}
volumes:
  - name: scratch
    emptyDir:
      sizeLimit: {{ $values.scratch }}
  - name: run
    emptyDir:
      medium: Memory
      sizeLimit: 16Mi
  - name: shared-memory
    emptyDir:
      medium: Memory
      sizeLimit: {{ $values.sharedMemory }}
  {{- if include "bascule.claim" .root }}
  - name: data
    persistentVolumeClaim:
      claimName: {{ include "bascule.claim" .root }}
  {{- end }}
  {{- if $key }}
  - name: ssh-key
    secret:
      secretName: {{ $values.ddl.sshKeySecret }}
      defaultMode: 0440
  {{- if not $host }}
  - name: hosts
    configMap:
      name: {{ include "bascule.name" .root }}-hosts
  {{- end }}
  {{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A GPU is asked for by its limit, and its request is the same. */}}
{{- define "bascule.resources" -}}
{{- $limits := deepCopy .resources.limits -}}
{{- $requests := deepCopy (.resources.requests | default .resources.limits) -}}
{{- if .gpus -}}
{{- $_ := set $limits "nvidia.com/gpu" (int .gpus) -}}
{{- $_ := set $requests "nvidia.com/gpu" (int .gpus) -}}
{{- end -}}
limits:
  {{- toYaml $limits | nindent 2 }}
requests:
  {{- toYaml $requests | nindent 2 }}
{{- end -}}

{{/* The name of the volume's claim; empty where there is none. */}}
{{- define "bascule.claim" -}}
{{- if .Values.data.size -}}{{- include "bascule.name" . }}-data{{- else -}}{{- .Values.data.claim -}}{{- end -}}
{{- end -}}

{{/* What the launcher runs: the image's entry point waits for the hosts of /etc/mpi/hostfile, then ddlrun reads it. */}}
{{- define "bascule.launchArgs" -}}
{{- toYaml (concat (list "launch" "ddlrun") .Values.ddl.options (list "--") .Values.command) -}}
{{- end -}}
