// Cross-attention of text over long visual features that are divided among ranks: bytes and time if
// keys and values travel, and if queries do, over an emulated link.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

int main() {
  const CrossAttentionShape shape{.text = 32,
                                  .visual = 2048,
                                  .hidden = 64,
                                  .features = 48,
                                  .heads = 4,
                                  .kv_heads = 4,
                                  .head_dim = 16};
  std::atomic<bool> correct = true;
  WorldOptions options;
  options.ranks = 2;
  options.link = EmulatedLink::parse("100MB/s,50us");

  run_threads(options, [&](Communicator& comm) {
    std::vector<Memory> memory;
    const auto random = [&](int64_t rows, int64_t columns, int64_t first_row = 0) {
      memory.emplace_back(size_t(rows * columns) * sizeof(float));
      const Tensor tensor = memory.back().view(DType::f32, {rows, columns});
      for (int64_t i = 0; i < tensor.elements(); ++i) {
        tensor.as<float>()[i] = normal(1, memory.size(), uint64_t(first_row * columns + i)) / 4;
      }
      return tensor;
    };
    const Shard text = shard_of(shape.text, comm.size(), comm.rank());
    const Shard visual = shard_of(shape.visual, comm.size(), comm.rank());
    const int64_t inner = shape.heads * shape.head_dim;
    const Tensor x = random(text.count, shape.hidden, text.begin);
    const Tensor features = random(visual.count, shape.features, visual.begin);
    const CrossAttentionWeights weights{random(inner, shape.hidden), random(inner, shape.features),
                                        random(inner, shape.features), random(shape.hidden, inner)};
    Tensor out[2];
    for (const char* form : {"ring", "queries"}) {
      const bool queries = std::strcmp(form, "queries") == 0;
      out[queries] = random(text.count, shape.hidden);
      CrossAttention layer(comm, shape, {.form = form, .backward = false});
      CrossAttentionBatch batch;
      layer.forward(x, features, weights, out[queries], batch);  // warm up
      comm.barrier();
      const uint64_t before = comm.bytes_sent();
      const auto start = std::chrono::steady_clock::now();
      layer.forward(x, features, weights, out[queries], batch);
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      const uint64_t bytes = comm.bytes_sent() - before;
      if (bytes != uint64_t(layer.forward_bytes())) correct = false;
      if (comm.rank() == 0) {
        std::printf("%-8s %6.2f ms, %7llu bytes   (%s link)\n", form, took.count(),
                    static_cast<unsigned long long>(bytes), comm.link().c_str());
      }
    }
    const float* const a = out[0].as<float>();
    if (!std::equal(a, a + out[0].elements(), out[1].as<float>())) correct = false;
  });
  std::printf("same result: %s\n", correct ? "yes" : "no");
  return correct ? 0 : 1;
}
