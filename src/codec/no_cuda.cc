// Stubs of the GPU codecs in a build without CUDA; unreachable, as there are no GPU communicators.
#include "codec/enqueue.h"
#include "codec/quantize.h"
#include "codec/topk.h"
#include "tandem/error.h"

namespace tandem {

void encode_on_gpu(const Exec&, const Wire&, const Tensor&, std::byte*) {
  throw Unsupported("encode on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

void decode_on_gpu(const Exec&, const Wire&, const std::byte*, const Tensor&) {
  throw Unsupported("decode on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

void quantize_rows_on_gpu(Communicator&, const Tensor&, const Tensor&, const Tensor&) {
  throw Unsupported(
      "quantize_rows on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

void quantize_rows_on_gpu(const Exec&, const Tensor&, const Tensor&, const Tensor&) {
  throw Unsupported(
      "quantize_rows on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

void quantize_columns_on_gpu(const Exec&, const Tensor&, const Tensor&, const Tensor&) {
  throw Unsupported(
      "quantize_columns on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

namespace codec {

void encode_topk_on_gpu(const Exec&, const TopK&, float, const Tensor&, const Tensor&, std::byte*) {
  throw Unsupported(
      "encode_topk on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

void mean_topk_on_gpu(const Exec&, const TopK&, std::span<const std::byte* const>, TopKMean,
                      const Tensor&) {
  throw Unsupported("mean_topk on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace codec
}  // namespace tandem
