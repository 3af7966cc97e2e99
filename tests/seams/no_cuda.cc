// Stub of the toy operator on GPUs for a build without CUDA.
#include "tandem/error.h"
#include "tests/seams/gather_scale.h"

namespace tandem::test {

std::unique_ptr<OverlapOperator> gather_scale_on_gpu(Communicator&, const OpDesc&,
                                                     const OverlapOptions&) {
  throw Unsupported("gather_scale on GPUs: this build has no CUDA");
}

}  // namespace tandem::test
