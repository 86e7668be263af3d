{{/*
A pod's metadata and spec, for every part of a job. Takes a dict:
  root       the chart's context
  component  trainer (the one pod without DDL), worker (a host), launcher (where ddlrun runs) or test
  args       the container's arguments, after the image's entry point
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
{{- $worker := eq .component "worker" -}}
{{- $plain := eq $values.mode "plain" -}}
{{- $logsIn := include "bascule.logsIn" . -}}
{{- $key := and $logsIn $plain -}}
{{- $works := ne .component "test" -}}{{/* a test would hang where a volume can be mounted by one node only */}}
{{- $claim := "" -}}
{{- if $works }}{{ $claim = include "bascule.claim" .root }}{{ end -}}
automountServiceAccountToken: false
{{- with $values.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- if not (and $logsIn (not $plain)) }}{{/* there the MPIJob says it */}}
restartPolicy: Never
{{- end }}
{{- if and $worker $plain }}
subdomain: {{ include "bascule.runName" .root }} # the Service's; the Job gives each pod its hostname
{{- end }}
enableServiceLinks: false
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- if and $logsIn $values.ddl.hostNetwork }}
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
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
containers:
  - name: {{ .component }}
    image: {{ include "bascule.image" .root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args:
      {{- toYaml .args | nindent 6 }}
    workingDir: {{ ternary $values.data.mountPath "/home/bascule" (ne $claim "") }}
    {{- $resources := include "bascule.resources" . }}
    {{- $gpus := contains "nvidia.com/" $resources }}{{/* a part of one, too: nvidia.com/mig-1g.10gb */}}
    {{- $serves := and $values.metrics.port (has .component (list "trainer" "worker")) }}
    {{- $alone := and $serves (eq .component "trainer") }}
    {{- if or $logsIn $values.env $alone (not $gpus) }}
    env:
      {{- if not $gpus }}
      # Images of CUDA ask for all GPUs, and where NVIDIA's runtime is the node's default they would get them uncounted.
      - name: NVIDIA_VISIBLE_DEVICES
        value: void
      {{- end }}
      {{- if $logsIn }}
      - name: BASCULE_SSH_PORT
        value: {{ $values.ddl.sshPort | quote }}
      - name: BASCULE_WAIT_SECONDS
        value: {{ $values.ddl.waitSeconds | quote }}
      # Open MPI would cut the hosts' names at the first dot, and Kubernetes finds them by the whole name only.
      - name: PRTE_MCA_prte_keep_fqdn_hostnames
        value: "true"
      - name: OMPI_MCA_orte_keep_fqdn_hostnames
        value: "true"
      {{- if $values.ddl.hostNetwork }}
      # A host on the launcher's node has the launcher's own address, by which Open MPI would start its ranks here.
      - name: PRTE_MCA_prte_do_not_resolve
        value: "true"
      - name: OMPI_MCA_orte_do_not_resolve
        value: "true"
      {{- end }}
      {{- end }}
      {{- if $alone }}{{/* ranks of DDL get theirs from ddlrun */}}
      - name: LMS_METRICS_PORT
        value: {{ $values.metrics.port | quote }}
      - name: LMS_METRICS_ADDRESS
        valueFrom:
          fieldRef:
            fieldPath: status.podIP
      {{- end }}
      {{- with $values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
    {{- if or $worker $serves }}
    ports:
      {{- if $worker }}
      - name: ssh
        containerPort: {{ $values.ddl.sshPort }}
      {{- end }}
      {{- if $serves }}
      - name: metrics
        containerPort: {{ $values.metrics.port }}
      {{- end }}
    {{- end }}
    {{- if $worker }}
    readinessProbe:
      # It is written before sshd starts, with whose end the container's comes. sshd takes a connection without a login,
      # such as a probe's by TCP, for an error and writes it into the log.
      exec:
        command: [test, -e, /run/bascule/ssh/sshd_config]
      periodSeconds: 5
    {{- end }}
    resources:
      {{- $resources | nindent 6 }}
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
      {{- if $claim }}
      - name: data
        mountPath: {{ $values.data.mountPath }}
      {{- end }}
      {{- if $key }}
      - name: ssh-key
        mountPath: /etc/bascule/ssh
        readOnly: true
      - name: hosts
        mountPath: /etc/mpi
        readOnly: true
      {{- end }}
      {{- if $works }}
      {{- with $values.volumeMounts }}
      {{- toYaml . | nindent 6 }}
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
  {{- if $claim }}
  - name: data
    persistentVolumeClaim:
      claimName: {{ $claim | quote }}
  {{- end }}
  {{- if $key }}
  - name: ssh-key
    secret:
      secretName: {{ $values.ddl.sshKeySecret | quote }}
      defaultMode: 0440
  - name: hosts
    configMap:
      name: {{ include "bascule.runName" .root }}-hosts
  {{- end }}
  {{- if $works }}
  {{- with $values.volumes }}
  {{- toYaml . | nindent 2 }}
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
{{- if $works }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $constraint := deepCopy . }}
  {{- if not (hasKey . "labelSelector") }}
  {{- $_ := set $constraint "labelSelector" (dict "matchLabels" (include "bascule.selector" $ | fromYaml)) }}
  {{- end }}
  - {{- toYaml $constraint | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Whether a pod is one of a job's hosts or logs in to them; empty where not. The operator's keys are for its own. */}}
{{- define "bascule.logsIn" -}}
{{- $test := and (eq .component "test") .root.Values.ddl.enabled (eq .root.Values.mode "plain") -}}
{{- if or $test (has .component (list "worker" "launcher")) }}true{{ end -}}
{{- end -}}

{{/* How many whole GPUs a pod takes. */}}
{{- define "bascule.gpus" -}}
{{- if eq .component "trainer" -}}
{{- int .root.Values.gpus -}}
{{- else -}}
{{- ternary (int .root.Values.ddl.gpusPerHost) 0 (and (eq .component "worker") (gt (int .root.Values.gpus) 0)) -}}
{{- end -}}
{{- end -}}

{{/* A GPU is asked for by its limit, and its request is the same. */}}
{{- define "bascule.resources" -}}
{{- $trains := has .component (list "trainer" "worker") -}}
{{- $amounts := ternary .root.Values.resources .root.Values.launcherResources $trains -}}
{{- $limits := deepCopy $amounts.limits -}}
{{- $requests := deepCopy ($amounts.requests | default $amounts.limits) -}}
{{- with int (include "bascule.gpus" .) -}}
{{- $_ := set $limits "nvidia.com/gpu" . -}}
{{- $_ := set $requests "nvidia.com/gpu" . -}}
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

{{/*
What is launched: the image's entry point waits for the hosts of /etc/mpi/hostfile, then ddlrun reads it. Ranks
get variables from ddlrun and not from their pods: of each the name stands here, and the launcher has the value. Those of
DDL ddlrun passes on by itself, DDL_OPTIONS with what its own options add, which -x would take away.
*/}}
{{- define "bascule.launchArgs" -}}
{{- $exports := list -}}
{{- range .Values.env -}}
{{- if not (hasPrefix "DDL_" .name) -}}
{{- $exports = concat $exports (list "-x" .name) -}}
{{- end -}}
{{- end -}}
{{- $metrics := list -}}
{{- with .Values.metrics.port -}}{{/* of a pod with a network of its own, all addresses are the pod's */}}
{{- $metrics = list "--metrics-port" (toString .) "--metrics-address" "0.0.0.0" -}}
{{- end -}}
{{- toYaml (concat (list "ddlrun") $exports $metrics .Values.ddl.options (list "--") .Values.command) -}}
{{- end -}}
