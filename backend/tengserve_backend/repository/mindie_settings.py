"""Settings of MindIE's config.json that have another name here, or none.

Keys that MindIE and config.pbtxt share (maxSeqLen, maxInputTokenLen, maxIterTimes, maxBatchSize, fullTextEnabled,
trustRemoteCode) are not in it: they mean here what they mean there. Names of MindIE's settings: its service
configuration, ServerConfig, ModelDeployConfig, ModelConfig and ScheduleConfig.
"""

from __future__ import annotations

from typing import Final

MINDIE_SETTINGS: Final[dict[str, str]] = {
    "modelName": "the name of the model's folder",
    "modelWeightPath": "the parameter weights, unless the weights are in the version folder",
    "npuMemSize": "the parameter kvCacheMemory: 4GiB for 4, auto for -1",
    "npuDeviceIds": "the parameter device, one device a model: npu:0 for [[0]]",
    "worldSize": "nothing: a model runs on one device",
    "maxPrefillTokens": (
        "nothing, as a rule: the parameter maxBatchedTokens at auto keeps streams going beside prompts, and MindIE's "
        "number would not"
    ),
    "truncation": "nothing: a prompt that is too long is refused",
    "cpuMemSize": "nothing: no KV cache is swapped to the host",
    "maxPreemptCount": "nothing: a sequence that has to give its cache back is computed again",
    "backendType": "nothing: transformers' models are run by one engine",
    "templateType": "nothing: prompts and streams share the steps",
    "prefillPolicyType": "nothing: by priority, then by time of arrival",
    "decodePolicyType": "nothing: by priority, then by time of arrival",
    "maxFirstTokenWaitTime": "nothing: no request waits for others to come",
    "maxN": "nothing: one answer a request",
    "maxJsonDepth": "nothing: a bound of the server's own",
    "inferMode": "nothing: one process computes prompts and streams",
    "multiNodesInferEnabled": "nothing: one machine a server",
    "cacheBlockSize": "nothing: the device decides",
    "maxPrefillBatchSize": "nothing: prompts and streams share the steps",
    "supportSelectBatch": "nothing: prompts and streams share the steps",
    "prefillTimeMsPerReq": "nothing: prompts and streams share the steps",
    "decodeTimeMsPerReq": "nothing: prompts and streams share the steps",
    "maxQueueDelayMicroseconds": "nothing: no request waits for others to come",
    "tokenizerProcessNumber": "nothing: each model has a thread for its tokenizer",
    "modelInstanceNumber": "nothing: one instance a model and server",
    "ipAddress": "the flag --host",
    "managementIpAddress": "the flag --host",
    "allowAllZeroIpListening": "the flag --host, which takes 0.0.0.0",
    "port": "the flags --http-port and --grpc-port",
    "managementPort": "the flag --http-port, which has health and metrics too",
    "metricsPort": "the flag --http-port, which has health and metrics too",
    "maxLinkNum": "the flag --max-connections, and the parameter maxWaitingRequests",
    "maxRequestLength": "the flag --max-body-bytes, and for texts --max-infer-text-chars and --max-generate-text-chars",
    "tokenTimeout": "nothing: the timeout of a request, 600 s unless it says otherwise",
    "e2eTimeout": "nothing: the timeout of a request, 600 s unless it says otherwise",
    "httpsEnabled": "nothing for HTTP: a gateway or a mesh; --grpc-tls-cert and --grpc-tls-key for gRPC",
}
"""What takes the place of a setting, by MindIE's name."""
