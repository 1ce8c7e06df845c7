"""The TOMLs of torchpipe's document "training", character by character."""

from __future__ import annotations

# -- solution 2, step 1, which is also its gpu_decode_val.toml; that of training has 232 in the place of 224 --------

DECODE = """
batching_timeout = 1 
instance_num =1

[jpg_decoder]
backend = "SyncTensor[ Sequential[DecodeTensor,ResizeTensor,cvtColorTensor] ]" 
resize_h = 224
resize_w = 224 
color = "rgb"
next = "cpu_decoder"
instance_num =6

[cpu_decoder]
backend = "SyncTensor[Sequential[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]   ]" 
filter = "or" 
resize_h = 224 
resize_w = 224 
color = "rgb"
instance_num =8 
"""  # noqa: W291

# -- solution 1, step 2 ---------------------------------------------------------------------------------------------

DECODE_AND_MODEL = f"""{DECODE.rstrip()}
next = "resnet50"

[resnet50]
backend = "SyncTensor[TensorrtTensor]" 
max='4'
model = "/app/pth/dog-cat/checkpoint_resnet50.onnx"
instance_num = 2
"""  # noqa: W291
