// A prompt in two chunks, one's sums overlapped with the other's computation, compared with one
// chunk and with rows split over the ranks: the same residual, keys and values, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/infer/decoder.h"
#include "engine/infer/rows.h"
#include "engine/model/initialize.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "overlap/contract/receipt.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"
#include "tests/flat.h"

namespace tandem::test {
namespace {

constexpr int64_t kCapacity = 300;

ModelConfig model(bool parallel_block) {
  ModelConfig config;
  config.vocab = 37;
  config.hidden = 48;
  config.layers = 2;
  config.heads = config.kv_heads = 12;  // 1 to 4 ranks
  config.head_dim = 4;
  config.ffn = 40;
  config.max_seq = kCapacity;
  config.parallel_block = parallel_block;
  config.sliding_window = parallel_block ? 0 : 40;
  return config;
}
ModelConfig model_with_norms_after() {
  ModelConfig config = model(false);
  config.norm_position = "post", config.qk_norm = config.qk_norm_all_heads = true;
  return config;
}

std::vector<int32_t> tokens_for(int64_t count, uint64_t seed) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i)
    tokens.push_back(int32_t(philox(seed, 1, uint64_t(i))[0] % 37));
  return tokens;
}

/// A model's shard with weights far from a fresh one's, and caches.
struct Rank {
  Rank(Communicator& comm, const ModelConfig& model_config, DType dtype_, const char* codec)
      : tp(comm),
        dtype(dtype_),
        config(model_config),
        layout(config, tp.size(), tp.rank()),
        weights(Exec{}, layout, dtype),
        rope(Exec{}, config.max_seq, config),
        cache(Exec{}, config, layout, rope, dtype, {pages_of(kCapacity), 1, kCapacity, kCapacity}),
        context{tp, config, layout, weights, dtype, cache, CodecPolicy::parse(codec)},
        step_memory(context, kCapacity) {
    initialize_parameters({}, layout, config, 17, weights.values());
    for (float& w : floats(weights.values())) w = w == 1 ? w : w * 6;
    weights.refresh();
  }

  /// The last residual row and all cached values, after `count` tokens and then 5 more, which
  /// only a runner of any number of rows takes.
  std::vector<float> run(RowRunner& runner, int64_t count, bool runs_more = true) {
    Memory memory(2 * size_t(config.hidden) * sizeof(float));
    const Tensor last = memory.view(DType::f32, {2, config.hidden});
    clear(Exec{}, last);
    run_tokens(runner, tokens_for(count, 3), 0, last.rows(0, 1));
    if (runs_more) {
      run_tokens(runner, tokens_for(std::min<int64_t>(count, 5), 4), count, last.rows(1, 1));
    }
    std::vector<float> all(last.as<float>(), last.as<float>() + last.elements());
    const auto blobs = tp.exchange(std::as_bytes(std::span(all)), "residuals");
    for (const auto& blob : blobs) EXPECT_EQ(blob, blobs[0]) << "ranks differ";
    for (size_t i = 0; i < layout.branches.size(); ++i) {
      if (!layout.branches[i].attention) continue;
      for (const Tensor& pages : {cache.layer(i).keys, cache.layer(i).values}) {
        const Activation values(DType::f32, 1, pages.elements());
        const Tensor flat(pages.data(), dtype, {1, pages.elements()});
        cast(Exec{}, flat, values);
        all.insert(all.end(), values->as<float>(), values->as<float>() + values->elements());
        clear(Exec{}, pages);
      }
    }
    return all;
  }

  void run_tokens(RowRunner& runner, std::vector<int32_t> tokens, int64_t position,
                  const Tensor& last) {
    const auto count = int64_t(tokens.size());
    const std::vector<int32_t> chosen = {int32_t(count - 1)};
    tokens.resize(size_t(kCapacity), 1);  // padding
    cache.set_rows(position, count);
    runner.run(Tensor::of(std::span<const int32_t>(tokens), {kCapacity}), count);
    runner.gather(Tensor::of(std::span<const int32_t>(chosen), {1}), last);
  }
  std::unique_ptr<RowRunner> runner(RowsKind kind, int chunks, int64_t rows) {
    return make_row_runner(context, {.name = "", .kind = kind, .chunks = chunks}, rows,
                           {.strategy = Strategy::serial}, step_memory, nullptr);
  }
  std::unique_ptr<RowRunner> chunks(int count, int64_t rows = kCapacity) {
    return runner(RowsKind::replicated, count, rows);
  }

  Communicator& tp;
  DType dtype;
  ModelConfig config;
  ModelLayout layout;
  Weights weights;
  RopeTables rope;
  KvCache cache;
  DecoderContext context;
  StepMemory step_memory;
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += std::pow(double(a[i]) - double(b[i]), 2);
    size += std::pow(double(b[i]), 2);
  }
  return std::sqrt(squares / size);
}

class PrefillForms : public OnRanks {};
TANDEM_INSTANTIATE(PrefillForms);

TEST_P(PrefillForms, ReceiptsSayWhyAPromptIsNotInChunks) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    clear_receipts();
    Rank rank(comm, model(false), DType::f32, "none");
    const auto receipt_of = [&](int64_t rows, Strategy strategy) {
      Decoder decoder(rank.context, rows, 1, {.prefill = strategy});
      StepRows step;
      step.tokens = tokens_for(5, 3);
      step.sequences.assign(5, 0);
      step.positions = {0, 1, 2, 3, 4};
      step.pages.assign(size_t(pages_of(kCapacity)), 0);
      step.chunks = {{0, 5}};
      decoder.run(step);
      for (const Receipt& each : receipts()) {
        if (each.op != "prefill" || each.asked == Strategy::serial) continue;
        EXPECT_EQ(each.ran, decoder.form().form);
        EXPECT_EQ(each.candidate, decoder.form().name);
        EXPECT_EQ(each.calls, 1);
        return each;
      }
      return Receipt{.why = "serial was asked for"};
    };
    const Receipt few = receipt_of(32, Strategy::automatic);
    EXPECT_THROW(parse_prefill("ISO"), InvalidArgument);
    if (comm.size() == 1) {
      EXPECT_EQ(few.why, "serial was asked for");
      return;
    }
    EXPECT_EQ(few.why, "no candidate overlaps: ISO: 32 rows: expected at least 64");
    clear_receipts();
    EXPECT_EQ(receipt_of(32, Strategy::overlapped).why, "");
    clear_receipts();
    EXPECT_EQ(receipt_of(32, Strategy::serial).why, "serial was asked for");
  });
}

TEST_P(PrefillForms, ChunksKeepTheBits) {
  run([&](Communicator& comm) {
    set_kernel_threads(1);
    for (const ModelConfig& config : {model(false), model(true), model_with_norms_after()}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const int64_t count : {1, 4, 5, 17, 255}) {
          const std::string what = std::to_string(count) + " tokens, " +
                                   std::string(name_of(dtype)) +
                                   (config.parallel_block ? ", block" : "") +
                                   (config.has_post_norm() ? ", norms after" : "");
          Rank uncompressed(comm, config, dtype, "none");
          const auto sharded = uncompressed.runner(RowsKind::sharded, 1, count);
          EXPECT_TRUE(sharded->takes(count));
          const std::vector<float> expected = uncompressed.run(*sharded, count, count <= 5);
          for (const char* codec : {"none", "lossless"}) {
            Rank rank(comm, config, dtype, codec);
            const auto two = rank.chunks(2);
            const std::vector<float> serial = rank.run(*rank.chunks(1), count, count <= 5),
                                     iso = two->takes(count) ? rank.run(*two, count, count <= 5)
                                                             : serial;
            if (rows_keep_bits()) {
              EXPECT_TRUE(serial == expected) << what << ", one chunk, " << codec;
              EXPECT_TRUE(iso == expected) << what << ", two chunks, " << codec;
            }
            EXPECT_LT(distance(iso, expected), dtype == DType::f32 ? 1e-5 : 0.05) << what;
          }
        }
      }
    }
  });
}

TEST_P(PrefillForms, ChunksKeepTheBitsOfLossyCodecsToo) {
  run([&](Communicator& comm) {
    set_kernel_threads(1);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t count : {1, 4, 5, 17, 255}) {
        Rank uncompressed(comm, model(false), dtype, "none");
        const std::vector<float> expected = uncompressed.run(*uncompressed.chunks(1), count);
        double before = 0;
        for (const char* codec : {"int8", "mlp=int4:g32", "int4:g32",
                                  "attention=int4:g32,mlp=int4:g32,embeddings=int4:g32"}) {
          Rank rank(comm, model(false), dtype, codec);
          const auto two = rank.chunks(2);
          const std::vector<float> serial = rank.run(*rank.chunks(1), count),
                                   iso = two->takes(count) ? rank.run(*two, count) : serial;
          if (rows_keep_bits()) {
            EXPECT_TRUE(iso == serial) << count << " tokens, " << codec;
          }
          const double rise = distance(serial, expected);
          EXPECT_LT(rise, 0.3) << codec;
          if (comm.size() == 1) {
            EXPECT_TRUE(serial == expected) << "one rank sends nothing";
          } else if (dtype == DType::f32) {
            EXPECT_GT(rise, before) << codec;
            before = rise;
          }
        }
      }
    }
  });
}

// A block sized for many tokens runs fewer, call after call, without remainders of earlier calls.
TEST_P(PrefillForms, FewerTokensThanCapacityGiveTheSameBits) {
  run([&](Communicator& comm) {
    set_kernel_threads(1);
    Rank rank(comm, model(false), DType::f32, "int4:g32");
    const auto one = rank.chunks(1, 64), two = rank.chunks(2, 64);
    for (const int64_t count : {64, 4, 7, 33}) {
      const std::vector<float> serial = rank.run(*one, count), iso = rank.run(*two, count);
      if (rows_keep_bits()) {
        EXPECT_TRUE(iso == serial) << count << " tokens";
      }
    }
  });
}

}  // namespace
}  // namespace tandem::test
