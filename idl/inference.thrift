// The contract of the inference service. ping and infer_batch, their structs and field numbers are what
// existing clients speak: never change them. The rest may grow new optional fields.
namespace py inference

struct InferenceParams {
    1: required string uuid,    // the caller's name for this request, free text
    2: required binary data,    // an encoded image, for the usual configuration
}

struct InferenceResult {
    1: required string label,
    2: required double score,
}

// Why a request has no result.
exception InferenceError {
    1: required string code,            // a code of torchpipe_py/errors.py ("overloaded", "decode_error", ...), or why
                                        // a message was refused: "too_large", "too_slow", "too_deep", "bad_type", ...
    2: required string message,         // one line for a person
    3: optional i32 retry_after_ms,     // when a repetition may succeed, for "overloaded" and "unavailable"
}

// An array in C order, little-endian.
struct Tensor {
    1: required string dtype,           // NumPy's name: "uint8", "float32", "int64", ..., or "bfloat16" (in requests), or
                                        // "string": texts in UTF-8, each after its length in four bytes
    2: required list<i64> shape,
    3: required binary data,
}

// A value of the request's dict: exactly one field is set. Dicts and lists of plain values (boxes, say), null and
// integers beyond 64 bits come back as text, in JSON; InferResponse.json names them.
union Value {
    1: Tensor tensor,
    2: binary bytes,
    3: string text,
    4: double number,
    5: i64 integer,
    6: list<Tensor> tensors,
}

struct InferRequest {
    1: required string uuid,
    2: required map<string, Value> inputs,   // keys of the request's dict; "data" is the pipeline's input
    3: optional string node_name,            // which root to enter, where the configuration has several
    4: optional i32 deadline_ms,             // answer within so many milliseconds, or with "deadline_exceeded"
    5: optional list<string> outputs,        // keys wanted back; default: ["result"]
    6: optional string traceparent,          // the trace it is part of, as in the W3C's header of that name
    7: optional string tracestate,
    8: optional i32 priority,                // 0 (normal) or 1 (low: taken when no normal request waits)
    9: optional string parameters,           // for backends, such as {"threshold": 0.5}: an object in JSON
}

// A label with its score, and a list of such pairs, come as JSON text under their key; beside it stand "label" (text)
// and "score" (number), those of the first pair. Detections come as JSON text: a list of objects with "box" ([left, top,
// right, bottom] in pixels), "score", "class", and perhaps "label", "keypoints" and "mask".
struct InferResponse {
    1: required string uuid,
    2: required map<string, Value> outputs,
    3: optional list<string> json,           // keys of outputs whose text is JSON
    4: optional list<string> detections,     // those of them that are detections
}

// One item of infer_many: exactly one of the three fields is set.
struct InferenceOutcome {
    1: optional InferenceResult result,      // of one of params
    2: optional InferenceError error,
    3: optional InferResponse response,      // to one of inputs
}

service InferenceService {
    void ping(),
    InferenceResult infer_batch(1: InferenceParams params) throws (1: InferenceError error),
    // params are images for a classifier. In their place, inputs are the inputs of requests to any pipeline, as
    // InferRequest has them; outputs, node_name, uuid and parameters are for all of these.
    list<InferenceOutcome> infer_many(1: list<InferenceParams> params, 2: i32 deadline_ms, 3: string traceparent,
                                      4: string tracestate, 5: i32 priority, 6: list<map<string, Value>> inputs,
                                      7: list<string> outputs, 8: string node_name, 9: string uuid,
                                      10: string parameters)
        throws (1: InferenceError error),
    InferResponse infer(1: InferRequest request) throws (1: InferenceError error),
}
