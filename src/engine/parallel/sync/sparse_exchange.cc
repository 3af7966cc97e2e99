#include "engine/parallel/sync/sparse_exchange.h"

#include "engine/parallel/sync/raw_values.h"

namespace tandem {
namespace {

class Sparse : public Exchange {
 public:
  Sparse(const codec::TopK& topk, double beta) : topk_(topk), beta_(float(beta)) { topk_.check(); }

  size_t max_bytes(const SyncShard& shard) const override {
    size_t bytes = 0;
    for_each(shard, [&](const Segment& segment) { bytes += segment_bytes(segment); });
    return bytes;
  }

  size_t encode(const SyncShard& shard, const Tensor& changes, const Tensor& unsent,
                std::byte* message) override {
    std::byte* to = message;
    for_each(shard, [&](const Segment& segment) {
      const Tensor values = changes.narrow(0, segment.begin, segment.count);
      if (segment.sharded) {
        encode_topk({}, topk_, beta_, values, unsent.narrow(0, segment.begin, segment.count), to);
      } else {
        write_raw(values, to);
      }
      to += segment_bytes(segment);
    });
    return size_t(to - message);
  }

  void combine(const SyncShard& shard, std::span<const std::byte* const> messages,
               const Tensor& mean) const override {
    std::vector<const std::byte*> from(messages.begin(), messages.end());
    for_each(shard, [&](const Segment& segment) {
      const Tensor values = mean.narrow(0, segment.begin, segment.count);
      if (segment.sharded) {
        mean_topk({}, topk_, from, codec::TopKMean::ranks, values);
      } else {
        mean_raw(from, values);
      }
      for (const std::byte*& message : from) message += segment_bytes(segment);
    });
  }

 private:
  struct Segment {
    int64_t begin = 0, count = 0;
    bool sharded = false;
  };

  size_t segment_bytes(const Segment& segment) const {
    return segment.sharded ? size_t(topk_.bytes(segment.count))
                           : size_t(segment.count) * sizeof(float);
  }

  template <typename Visit>
  static void for_each(const SyncShard& shard, const Visit& visit) {
    for (size_t i = 0; i < shard.slices.size();) {
      Segment segment{shard.slices[i].begin, 0, shard.slices[i].sharded};
      for (; i < shard.slices.size() && shard.slices[i].sharded == segment.sharded; ++i) {
        segment.count += shard.slices[i].count;
      }
      visit(segment);
    }
  }

  const codec::TopK topk_;
  const float beta_;
};

}  // namespace

std::unique_ptr<Exchange> make_sparse_exchange(const codec::TopK& topk, double beta) {
  return std::make_unique<Sparse>(topk, beta);
}

}  // namespace tandem
