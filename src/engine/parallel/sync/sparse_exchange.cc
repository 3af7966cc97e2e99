#include "engine/parallel/sync/sparse_exchange.h"

#include "engine/parallel/sync/segmented_exchange.h"

namespace tandem {
namespace {

class Sparse : public SegmentedExchange {
 public:
  Sparse(const codec::TopK& topk, double beta, const Exec& exec)
      : SegmentedExchange(exec), topk_(topk), beta_(float(beta)) {
    topk_.check();
  }

 private:
  bool continues(const SyncSlice&, const SyncSlice&) const override { return true; }
  size_t segment_bytes(const Segment& segment) const override {
    return size_t(topk_.bytes(segment.count));
  }
  void encode_segment(const Segment&, const Tensor& changes, const Tensor& unsent,
                      std::byte* message) override {
    encode_topk(exec(), topk_, beta_, changes, unsent, message);
  }
  void combine_segment(const Segment&, std::span<const std::byte* const> messages,
                       const Tensor& mean) const override {
    mean_topk(exec(), topk_, messages, codec::TopKMean::ranks, mean);
  }

  const codec::TopK topk_;
  const float beta_;
};

}  // namespace

std::unique_ptr<Exchange> make_sparse_exchange(const codec::TopK& topk, double beta,
                                               const Exec& exec) {
  return std::make_unique<Sparse>(topk, beta, exec);
}

}  // namespace tandem
