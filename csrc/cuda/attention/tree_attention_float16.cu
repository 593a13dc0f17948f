// Tree attention on tensor cores, for float16 caches.
#include "cuda/attention/tree_attention_tensor.cuh"

namespace specengine::attention {

template void attend_on_tensor_cores<Half>(const Problem&, void* stream);

}  // namespace specengine::attention
