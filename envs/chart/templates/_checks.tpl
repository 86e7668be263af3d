{{/*
What values.schema.json cannot say: values that are right each, and wrong together or missing. Every template that makes
something includes this first.
*/}}

{{- define "bascule.check" -}}
{{- with .Values.image -}}
{{- if not .repository -}}
{{- fail "image.repository is empty: name the image that the job runs in, such as registry.example/bascule-pytorch (`make image` builds one; push it where the cluster can pull it)" -}}
{{- end -}}
{{- if not (or .tag .digest) -}}
{{- fail "image.tag is empty, and image.digest too: name the image's version, such as 0.1.0-cpu-py311, or one build by its digest" -}}
{{- end -}}
{{- end -}}
{{- if not .Values.command -}}
{{- fail "command is empty: give the program and its arguments as a list, such as --set 'command={python,/data/train.py}'" -}}
{{- end -}}
{{- if and .Values.data.claim .Values.data.size -}}
{{- fail (printf "data.claim is %q and data.size is %q: a volume is either there already (data.claim) or made (data.size); leave one empty" .Values.data.claim .Values.data.size) -}}
{{- end -}}
{{- if and (not .Values.data.size) (or .Values.data.storageClass .Values.data.accessMode) -}}
{{- fail "data.storageClass and data.accessMode say how a volume is made, and data.size is empty: give its size, or leave them empty" -}}
{{- end -}}
{{- $given := list -}}
{{- range .Values.env -}}
{{- if hasPrefix "BASCULE_" .name -}}
{{- fail (printf "env names %s: variables that begin with BASCULE_ are the chart's own; ddl.sshPort and ddl.waitSeconds set them" .name) -}}
{{- end -}}
{{- if has .name (include "bascule.ownVariables" $ | fromYamlArray) -}}
{{- fail (printf "env names %s: the chart sets it itself, for GPUs by gpus and for the hosts' network by ddl.hostNetwork; leave it out" .name) -}}
{{- end -}}
{{- if has .name $given -}}
{{- fail (printf "env names %s twice: leave one of them out" .name) -}}
{{- end -}}
{{- $given = append $given .name -}}
{{- end -}}
{{- range $option := list "podLabels" "jobLabels" -}}
{{- range $name, $value := index $.Values $option -}}
{{- if or (hasPrefix "app.kubernetes.io/" $name) (hasPrefix "helm.sh/" $name) (hasPrefix "bascule." $name) -}}
{{- fail (printf "%s names %s: the chart finds its pods by its own labels of that kind; choose another name" $option $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $own := list "scratch" "run" "shared-memory" "data" "ssh-key" "hosts" -}}
{{- range .Values.volumes -}}
{{- if has .name $own -}}
{{- fail (printf "volumes names %s, which is the chart's own; the chart has %s: choose another name" .name (join ", " $own)) -}}
{{- end -}}
{{- end -}}
{{- $folders := list "/tmp" "/home/bascule" "/run/bascule" "/dev/shm" "/etc/bascule/ssh" "/etc/mpi" .Values.data.mountPath -}}
{{- range .Values.volumeMounts -}}
{{- if has (trimSuffix "/" .mountPath) $folders -}}
{{- fail (printf "volumeMounts names %s, where the chart mounts its own; the chart has %s: choose another path" .mountPath (join ", " $folders)) -}}
{{- end -}}
{{- end -}}
{{- range $part := list "resources" "launcherResources" -}}
{{- range $kind, $amounts := index $.Values $part -}}
{{- if hasKey ($amounts | default dict) "nvidia.com/gpu" -}}
{{- fail (printf "%s.%s names nvidia.com/gpu: GPUs are counted by gpus and, with DDL, ddl.gpusPerHost" $part $kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor (not .Values.metrics.port) -}}
{{- fail "metrics.serviceMonitor is true and metrics.port is 0: there is nothing to scrape; give metrics.port, such as 9117" -}}
{{- end -}}
{{- if .Values.ddl.enabled -}}
{{- include "bascule.checkDdl" . -}}
{{- end -}}
{{- end -}}

{{/* Those that a pod template sets, in some mode or for some pod; what is given twice, helm refuses or takes the last of. */}}
{{- define "bascule.ownVariables" -}}
- NVIDIA_VISIBLE_DEVICES
- PRTE_MCA_prte_keep_fqdn_hostnames
- OMPI_MCA_orte_keep_fqdn_hostnames
- PRTE_MCA_prte_do_not_resolve
- OMPI_MCA_orte_do_not_resolve
{{- if .Values.metrics.port }}
- LMS_METRICS_PORT
- LMS_METRICS_ADDRESS
{{- end }}
{{- end -}}

{{- define "bascule.checkDdl" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) -}}
{{- fail (printf "the release is called %q: its hosts and a Service are named after it, so choose a name of lower-case letters, digits and - that begins with a letter" .Release.Name) -}}
{{- end -}}
{{- $gpus := int .Values.gpus -}}
{{- $each := int .Values.ddl.gpusPerHost -}}
{{- $hosts := int .Values.ddl.hosts -}}
{{- if and (not $gpus) (not $hosts) -}}
{{- fail "ddl.enabled is true, and neither gpus nor ddl.hosts says on how many hosts: set gpus (and ddl.gpusPerHost), or ddl.hosts for a job on processors" -}}
{{- end -}}
{{- if and $gpus (mod $gpus $each) -}}
{{- fail (printf "gpus is %d and ddl.gpusPerHost is %d: the hosts would have different numbers of GPUs; make gpus a multiple of it" $gpus $each) -}}
{{- end -}}
{{- if and $gpus $hosts (ne (mul $hosts $each) $gpus) -}}
{{- fail (printf "ddl.hosts is %d, and gpus (%d) over ddl.gpusPerHost (%d) makes %d: leave ddl.hosts at 0 for a job on GPUs" $hosts $gpus $each (div $gpus $each)) -}}
{{- end -}}
{{- if and $gpus (ne (int .Values.ddl.ranksPerHost) 1) -}}
{{- fail (printf "ddl.ranksPerHost is %d and gpus is %d: on GPUs each has one rank; set ddl.gpusPerHost instead" (int .Values.ddl.ranksPerHost) $gpus) -}}
{{- end -}}
{{- if and (eq .Values.mode "plain") (not .Values.ddl.sshKeySecret) -}}
{{- fail "ddl.enabled is true, mode is plain and ddl.sshKeySecret is empty: the hosts need a key to log in to each other. Make one: ssh-keygen -t ed25519 -N '' -f key; kubectl create secret generic NAME --type kubernetes.io/ssh-auth --from-file ssh-privatekey=key; rm key key.pub; then --set ddl.sshKeySecret=NAME" -}}
{{- end -}}
{{- if and .Values.metrics.port .Values.ddl.hostNetwork -}}
{{- fail (printf "metrics.port is %d and ddl.hostNetwork is true: the figures would be open on every address of the nodes; choose one of the two" (int .Values.metrics.port)) -}}
{{- end -}}
{{- if and .Values.metrics.port (eq (int .Values.metrics.port) (int .Values.ddl.sshPort)) -}}
{{- fail (printf "metrics.port and ddl.sshPort are both %d: choose another port for one of them" (int .Values.ddl.sshPort)) -}}
{{- end -}}
{{- if and (eq .Values.mode "mpijob") .Values.ddl.sshKeySecret -}}
{{- fail (printf "ddl.sshKeySecret is %q and mode is mpijob: the MPI Operator makes the job's keys itself and would not use it; leave it empty" .Values.ddl.sshKeySecret) -}}
{{- end -}}
{{- end -}}

{{/* How many hosts a job with DDL has, and how many ranks each. */}}
{{- define "bascule.hosts" -}}
{{- if .Values.gpus -}}{{- div (int .Values.gpus) (int .Values.ddl.gpusPerHost) -}}{{- else -}}{{- int .Values.ddl.hosts -}}{{- end -}}
{{- end -}}

{{- define "bascule.slots" -}}
{{- if .Values.gpus -}}{{- int .Values.ddl.gpusPerHost -}}{{- else -}}{{- int .Values.ddl.ranksPerHost -}}{{- end -}}
{{- end -}}
