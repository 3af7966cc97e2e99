// Stubs of the GPU codecs in a build without CUDA; unreachable, as there are no GPU communicators.
#include "codec/quantize.h"

namespace tandem {

void quantize_rows_on_gpu(Communicator&, const Tensor&, const Tensor&, const Tensor&) {
  throw Unsupported(
      "quantize_rows on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace tandem
