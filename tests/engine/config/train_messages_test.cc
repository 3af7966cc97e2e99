// Gradients and weights over a wire format, compared with a run in one thread that encodes and
// decodes each message with the public functions.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>

#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "tandem/random.h"
#include "tests/flat.h"

namespace tandem {
namespace {

/// Two matrices with adjacent columns, norms and a padding between, odd sizes.
std::vector<Parameter> sample_parameters() {
  return {{"norm", {37}, {-1, 0, 37}, 0, 0, false},
          {"a", {80, 33}, {0, 0, 40}, 64, 60, true},
          {"b", {80, 27}, {0, 0, 40}, 97, 60, true},
          {"norm2", {5}, {-1, 0, 5}, 2464, 0, false},
          {"c", {300}, {0, 0, 300}, 2469, 0, true}};
}
constexpr size_t kElements = 2800;
constexpr int kSteps = 4;

bool is_sharded(size_t i) {
  return (i >= 64 && i < 2464) || (i >= 2469 && i < 2769);
}
bool is_padding(size_t i) {
  return (i >= 37 && i < 64) || i >= 2769;
}

float gradient_of(int64_t step, int rank, size_t i) {
  const float size = i % 400 < 3 ? 40.0f : 1.0f;  // some groups have outliers
  return is_padding(i) ? 0 : size * normal(5, uint64_t(step) * 64 + uint64_t(rank), i);
}
float weight_of(size_t i) {
  return is_padding(i) ? 0 : normal(5, 10000, i);
}

AdamStep adam_of(int64_t step) {
  OptimizerConfig config;
  return AdamStep::make(config, step, 0.01, 0);
}

/// Replaces `values` by their encoded and decoded values.
void cross(const Wire& wire, std::vector<float>& values) {
  if (wire.is_none()) return;
  const Tensor tensor(values.data(), DType::f32, {int64_t(values.size())});
  std::vector<std::byte> message(wire.bytes(tensor.elements(), DType::f32));
  encode(wire, tensor, message);
  decode(wire, message, tensor);
}

/// Computes one element after another, except for ranges that are messages.
struct Reference {
  int ranks;
  Buckets buckets;
  ShardedOptimizerOptions wires;
  std::vector<float> weights, masters, m, v;
  std::vector<std::vector<float>> residuals;

  Reference(int ranks_, int64_t bucket, const ShardedOptimizerOptions& wires_)
      : ranks(ranks_),
        buckets(int64_t(kElements), bucket, ranks_),
        wires(wires_),
        m(kElements),
        v(kElements),
        residuals(size_t(ranks_), std::vector<float>(kElements)) {
    for (size_t i = 0; i < kElements; ++i) weights.push_back(weight_of(i));
    masters = weights;
  }

  /// Calls `with(owner, indices)` for each range of sharded elements in one shard.
  template <typename With>
  void for_stretches(const With& with) const {
    for (int b = 0; b < buckets.count(); ++b) {
      for (int owner = 0; owner < ranks; ++owner) {
        const FlatRange shard = buckets.shard(b, owner);
        std::vector<size_t> stretch;
        for (int64_t i = shard.begin; i <= shard.begin + shard.count; ++i) {
          if (i < shard.begin + shard.count && is_sharded(size_t(i))) {
            stretch.push_back(size_t(i));
          } else if (!stretch.empty()) {
            with(owner, stretch);
            stretch.clear();
          }
        }
      }
    }
  }

  void step(int64_t step) {
    std::vector<std::vector<float>> sent(static_cast<size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      auto& values = sent[size_t(r)];
      for (size_t i = 0; i < kElements; ++i) values.push_back(gradient_of(step, r, i));
      auto& residual = residuals[size_t(r)];
      for_stretches([&](int owner, const std::vector<size_t>& stretch) {
        if (owner == r) return;
        std::vector<float> wanted, got;
        for (const size_t i : stretch) {
          wanted.push_back(values[i] + (wires.error_feedback ? residual[i] : 0));
        }
        got = wanted;
        cross(wires.gradients, got);
        for (size_t k = 0; k < stretch.size(); ++k) {
          values[stretch[k]] = got[k];
          residual[stretch[k]] = wanted[k] - got[k];
        }
      });
    }
    std::vector<float> sums = sent[0];
    for (int r = 1; r < ranks; ++r) {
      for (size_t i = 0; i < kElements; ++i) sums[i] += sent[size_t(r)][i];
    }
    const bool differences = ranks > 1 && !wires.weights.is_exact();
    if (!differences) masters = weights;
    for (const ParameterRun& run : parameter_runs(sample_parameters())) {
      const auto begin = size_t(run.begin), count = size_t(run.count);
      const auto slice = [&](std::vector<float>& values) {
        return flat(std::span(values).subspan(begin, count));
      };
      adamw({}, adam_of(step), run.decay, {slice(masters), slice(m), slice(v)}, slice(sums));
    }
    const std::vector<float> before = weights;
    weights = masters;
    if (!differences) return;
    for_stretches([&](int, const std::vector<size_t>& stretch) {
      std::vector<float> difference;
      for (const size_t i : stretch) difference.push_back(masters[i] - before[i]);
      cross(wires.weights, difference);
      for (size_t k = 0; k < stretch.size(); ++k) {
        weights[stretch[k]] = before[stretch[k]] + difference[k];
      }
    });
  }
};

/// Optimizer of one group of all ranks.
ShardedOptimizer make_optimizer(Communicator& comm, std::vector<float>& w, std::vector<float>& g,
                                int64_t bucket, const ShardedOptimizerOptions& wires) {
  return ShardedOptimizer({}, flat(w), flat(g),
                          {{comm, {0, int64_t(w.size())}, sample_parameters()}}, bucket, wires);
}

void expect_as_reference(int ranks, int64_t bucket, const ShardedOptimizerOptions& wires) {
  Reference reference(ranks, bucket, wires);
  std::vector<std::vector<float>> expected;
  for (int64_t step = 0; step < kSteps; ++step) {
    reference.step(step);
    expected.push_back(reference.weights);
  }
  WorldOptions options;
  options.ranks = ranks;
  run_threads(options, [&](Communicator& comm) {
    std::vector<float> w(kElements), g(kElements);
    for (size_t i = 0; i < kElements; ++i) w[i] = weight_of(i);
    ShardedOptimizer dp = make_optimizer(comm, w, g, bucket, wires);
    dp.adopt_weights(flat(w));
    for (int64_t step = 0; step < kSteps; ++step) {
      auto reported = int64_t(kElements);
      for (size_t i = kElements; i-- > 0;) {
        g[i] = gradient_of(step, comm.rank(), i);
        if (i % 301 != 0) continue;
        dp.ready({int64_t(i), reported - int64_t(i)});
        reported = int64_t(i);
      }
      dp.reduce();
      dp.update(adam_of(step));
      dp.await_all();
      const auto at = std::mismatch(w.begin(), w.end(), expected[size_t(step)].begin());
      ASSERT_EQ(at.first, w.end())
          << "rank " << comm.rank() << " step " << step << " element " << at.first - w.begin()
          << ": " << *at.first << ", expected " << *at.second;
    }
    const std::span<const float> residual = floats(dp.residuals()[0]);
    for (size_t i = 0; i < residual.size(); ++i) {
      ASSERT_EQ(residual[i], reference.residuals[size_t(comm.rank())][i]) << i;
    }
    EXPECT_EQ(residual.empty(), ranks == 1 || !wires.error_feedback || wires.gradients.is_exact());
    EXPECT_EQ(dp.has_masters(), ranks > 1 && !wires.weights.is_exact());
    // The owners' weights and all others' are of one step.
    const Moment of = dp.has_masters() ? Moment::master : Moment::weights;
    for (const StateSlice& slice : dp.slices(of)) {
      const float* expected_slice = reference.masters.data() + slice.begin;
      ASSERT_TRUE(std::ranges::equal(floats(slice.values),
                                     std::span(expected_slice, size_t(slice.values.elements()))))
          << slice.begin;
    }
  });
}

// Its residual is saved, and must then belong to the steps that were made.
TEST(DataParallelWires, DroppedStepKeepsTheResidual) {
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    std::vector<float> w(kElements), g(kElements);
    ShardedOptimizer dp = make_optimizer(comm, w, g, 70, {Wire::parse("int4:g32"), {}, true});
    dp.adopt_weights(flat(w));
    std::vector<float> before;
    for (int64_t step = 0; step < 3; ++step) {
      for (size_t i = 0; i < kElements; ++i) g[i] = gradient_of(step, comm.rank(), i);
      const std::span<const float> residual = floats(dp.residuals()[0]);
      before.assign(residual.begin(), residual.end());
      dp.reduce();
      EXPECT_TRUE(std::ranges::equal(floats(dp.residuals()[0]), before)) << step;
      if (step == 2) continue;
      dp.update(adam_of(step));
      dp.await_all();
    }
    EXPECT_TRUE(std::ranges::any_of(before, [](float x) { return x != 0; }));
  });
}

// The ranks' times of a step are exchanged in between, and would arrive after weights.
TEST(DataParallelWires, WeightsLeaveFromTheNextProgressOn) {
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    std::vector<float> w(kElements), g(kElements, 1);
    ShardedOptimizer dp = make_optimizer(comm, w, g, 70, {});
    dp.reduce();
    dp.update(adam_of(0));
    dp.await_slices();
    EXPECT_EQ(dp.take_sent().weights, 0);
    dp.progress();
    EXPECT_GT(dp.take_sent().weights, 0);
    dp.await_all();
  });
}

TEST(DataParallelWires, MatchTheReferenceBitForBit) {
  for (const char* gradients : {"none", "lossless", "int8", "int4:g32", "int2:g64:asym", "mxfp4"}) {
    for (const char* weights : {"none", "lossless", "int8", "int4:g16"}) {
      for (const int ranks : {1, 2, 3, 4}) {
        for (const int64_t bucket : {70, 5000}) {
          for (const bool feedback : {true, false}) {
            const bool both = gradients != std::string("none") && weights != std::string("none");
            if (both && (!feedback || bucket == 70 || ranks == 3)) continue;
            SCOPED_TRACE(fmt::format("gradients {} weights {} ranks {} bucket {} feedback {}",
                                     gradients, weights, ranks, bucket, feedback));
            expect_as_reference(ranks, bucket,
                                {Wire::parse(gradients), Wire::parse(weights), feedback});
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(DataParallelWires, ManyRanksMatchTheReferenceBitForBit) {
  for (const int ranks : {16, 17, 24}) {
    for (const int64_t bucket : {700, 5000}) {
      SCOPED_TRACE(fmt::format("ranks {} bucket {}", ranks, bucket));
      expect_as_reference(ranks, bucket, {});
      if (HasFatalFailure()) return;
    }
  }
}

// A gradient window: owners add the sum of a pass's gradients, in rank order, to those before.
TEST(DataParallelWires, ManyRanksSumEveryPassOfAWindow) {
  constexpr int kRanks = 24, kPasses = 3;
  std::vector<float> expected(kElements);
  for (int pass = 0; pass < kPasses; ++pass) {
    for (size_t i = 0; i < kElements; ++i) {
      float total = pass == 0 ? gradient_of(pass, 0, i) : expected[i];
      for (int rank = pass == 0 ? 1 : 0; rank < kRanks; ++rank) total += gradient_of(pass, rank, i);
      expected[i] = total;
    }
  }
  WorldOptions options;
  options.ranks = kRanks;
  run_threads(options, [&](Communicator& comm) {
    constexpr FlatRange kAll{0, int64_t(kElements)};
    std::vector<float> w(kElements);
    GradientMemory gradients(Exec{}, {.units = {{.range = kAll}}, .elements = kAll.count},
                             DType::f32);
    ShardedOptimizer optimizer(
        {}, flat(w), {}, {{comm, kAll, sample_parameters(), FlatWindow::all(kAll.count), true}},
        700, {.gradient_memory = &gradients});
    gradients.begin_step();
    for (int pass = 0; pass < kPasses; ++pass) {
      gradients.begin_write(0);
      auto* const values = gradients.at(0, kAll.count).as<float>();
      for (size_t i = 0; i < kElements; ++i) values[i] = gradient_of(pass, comm.rank(), i);
      optimizer.ready(kAll);
    }
    optimizer.reduce();
    for (const StateSlice& slice : optimizer.reduced_gradients()) {
      const std::span of_slice(expected.data() + slice.begin, size_t(slice.values.elements()));
      EXPECT_TRUE(std::ranges::equal(floats(slice.values), of_slice)) << slice.begin;
    }
    optimizer.update(adam_of(0));
    optimizer.await_all();
  });
}

float to_bf16(float value) {
  return BFloat16::from_float(value).to_float();
}

TEST(DataParallelWires, GradientsInBf16AreSummedInF32AndRoundedOnce) {
  for (const int ranks : {1, 2, 5}) {
    std::vector<float> expected(kElements);
    size_t rounded_twice = 0;
    for (size_t i = 0; i < kElements; ++i) {
      float total = 0, running = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const float term = to_bf16(gradient_of(0, rank, i));
        total += term, running = to_bf16(running + term);
      }
      expected[i] = to_bf16(total);
      rounded_twice += running != expected[i];
    }
    if (ranks > 2) {
      EXPECT_GT(rounded_twice, kElements / 10);  // what sums in bf16 would give
    }
    WorldOptions options;
    options.ranks = ranks;
    run_threads(options, [&](Communicator& comm) {
      std::vector<float> w(kElements), first(kElements), second(kElements);
      const Memory memory(kElements * sizeof(BFloat16));
      const Tensor gradients = memory.view(DType::bf16, {int64_t(kElements)});
      for (size_t i = 0; i < kElements; ++i) {
        gradients.as<BFloat16>()[i] = BFloat16::from_float(gradient_of(0, comm.rank(), i));
      }
      ShardedOptimizer optimizer({}, flat(w), gradients,
                                 {{comm, {0, int64_t(kElements)}, sample_parameters()}}, 700);
      const Squares squares = optimizer.reduce();
      EXPECT_GT(squares.sharded, 0);
      uint64_t received = 0;
      for (const StateSlice& slice : optimizer.reduced_gradients()) {
        received += uint64_t(slice.values.elements());
        for (int64_t i = 0; i < slice.values.elements(); ++i) {
          ASSERT_EQ(slice.values.as<BFloat16>()[i].to_float(), expected[size_t(slice.begin + i)]);
        }
      }
      EXPECT_LE(optimizer.take_sent().gradients, kElements * sizeof(BFloat16));
      EXPECT_GT(received, 0u);
      optimizer.update(adam_of(0));
      optimizer.await_all();
      std::vector<float> of_reference(kElements), sums = expected;
      for (const ParameterRun& run : parameter_runs(sample_parameters())) {
        const auto slice = [&](std::vector<float>& values) {
          return flat(std::span(values).subspan(size_t(run.begin), size_t(run.count)));
        };
        adamw({}, adam_of(0), run.decay, {slice(of_reference), slice(first), slice(second)},
              slice(sums));
      }
      EXPECT_EQ(w, of_reference);
    });
  }
}

TEST(DataParallelWires, GradientsInBf16AreRefusedWithAWireFormat) {
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    std::vector<float> w(kElements);
    const Memory memory(kElements * sizeof(BFloat16));
    EXPECT_THROW(ShardedOptimizer({}, flat(w), memory.view(DType::bf16, {int64_t(kElements)}),
                                  {{comm, {0, int64_t(kElements)}, sample_parameters()}}, 700,
                                  {.gradients = Wire::parse("int8")}),
                 Unsupported);
  });
}

// A snapshot needs no weights of other ranks: rank 1 sends its own only after rank 0 has all that
// it owns, however few buckets fit into the ring.
TEST(DataParallelWires, OwnedStateIsCompleteBeforeOtherRanksSend) {
  for (const int64_t bucket : {20, 5000}) {
    WorldOptions options;
    options.ranks = 2;
    run_threads(options, [&](Communicator& comm) {
      std::vector<float> w(kElements), g(kElements);
      ShardedOptimizer optimizer = make_optimizer(comm, w, g, bucket, {});
      const auto owned = [&] {
        std::vector<float> all;
        for (const Moment moment : {Moment::weights, Moment::first, Moment::second}) {
          for (const StateSlice& slice : optimizer.slices(moment)) {
            std::ranges::copy(floats(slice.values), std::back_inserter(all));
          }
        }
        return all;
      };
      const std::vector<float> before = owned();
      for (size_t i = 0; i < kElements; ++i) g[i] = gradient_of(0, comm.rank(), i);
      optimizer.reduce();
      if (comm.rank() == 1) comm.barrier("rank 0 has its state");
      optimizer.update(adam_of(0));
      optimizer.await_slices();
      const std::vector<float> early = owned();
      if (comm.rank() == 0) comm.barrier("rank 0 has its state");
      optimizer.await_all();
      EXPECT_NE(early, before);
      EXPECT_EQ(early, owned());
    });
  }
}

// Lost gradient is sent later: over many steps of one gradient the mean is correct, to one step's
// error over their number. Without feedback the same error recurs in every step.
TEST(DataParallelWires, FeedbackRecoversLostGradients) {
  constexpr int kMany = 50;
  constexpr float kSmall = 0.1f;  // far below a step of int2 in a group with a 1
  for (const bool feedback : {true, false}) {
    WorldOptions options;
    options.ranks = 2;
    run_threads(options, [&](Communicator& comm) {
      std::vector<float> w(kElements), g(kElements);
      ShardedOptimizer dp =
          make_optimizer(comm, w, g, int64_t(kElements), {Wire::parse("int2"), {}, feedback});
      double sum = 0, sent = 0;
      for (int step = 0; step < kMany; ++step) {
        for (size_t i = 64; i < 2464; ++i) g[i] = i % 16 == 0 ? 1.0f : kSmall;
        dp.ready({0, int64_t(kElements)});
        dp.reduce();
        // The owner's own shard is exact.
        const FlatRange local =
            Buckets(int64_t(kElements), int64_t(kElements), 2).shard(0, comm.rank());
        for (int64_t i = std::max<int64_t>(local.begin, 64);
             i < std::min<int64_t>(local.begin + local.count, 2464); ++i) {
          if (i % 16 != 0) sum += double(g[size_t(i)]) - kSmall, sent += kSmall;
        }
        dp.update(adam_of(step));
        dp.await_all();
      }
      if (feedback) {
        EXPECT_NEAR(sum, sent, 0.12 * sent);
      } else {
        EXPECT_EQ(sum, 0);
      }
    });
  }
}

TEST(ShardMessages, SegmentsCoverAShardInOrder) {
  const auto runs = parameter_runs(sample_parameters());
  for (const int64_t bucket : {1, 7, 70, 1000, 5000}) {
    for (const int ranks : {1, 2, 3}) {
      const Buckets buckets(int64_t(kElements), bucket, ranks);
      for (int b = 0; b < buckets.count(); ++b) {
        for (int owner = 0; owner < ranks; ++owner) {
          const FlatRange shard = buckets.shard(b, owner);
          int64_t at = 0;
          for (const Segment& segment : make_segments(shard, runs)) {
            EXPECT_EQ(segment.begin, at);
            EXPECT_GT(segment.count, 0);
            for (int64_t i = at; i < at + segment.count; ++i) {
              EXPECT_EQ(is_sharded(size_t(shard.begin + i)), segment.encoded);
            }
            at += segment.count;
          }
          EXPECT_EQ(at, shard.count);
        }
      }
    }
  }
}

// A lossless message has as many bytes as its values need, up to the max.
TEST(ShardMessages, MessagesRoundTrip) {
  const auto runs = parameter_runs(sample_parameters());
  const Buckets buckets(int64_t(kElements), 1300, 2);
  for (const char* text : {"none", "lossless", "int8", "int3:g16:spikes"}) {
    const Wire wire = Wire::parse(text);
    const ShardMessages messages(wire, buckets, runs);
    EXPECT_EQ(messages.max_bytes() % 16, 0u);
    for (int b = 0; b < buckets.count(); ++b) {
      const FlatRange shard = buckets.shard(b, 1);
      std::vector<float> values, got(size_t(shard.count), -1), again(size_t(shard.count), -1);
      for (int64_t i = 0; i < shard.count; ++i) {
        values.push_back(gradient_of(0, 0, size_t(shard.begin + i)));
      }
      std::vector<std::byte> message(messages.max_bytes() + 1, std::byte(0x5a));
      const size_t bytes = messages.encode(b, 1, values.data(), nullptr, message.data());
      EXPECT_LE(bytes, messages.max_bytes());
      EXPECT_EQ(message.back(), std::byte(0x5a));
      messages.decode(b, 1, message.data(), got.data());
      for (const Segment& segment : messages.segments(b, 1)) {
        for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
          if (!segment.encoded || wire.is_exact()) {
            EXPECT_EQ(got[size_t(i)], values[size_t(i)]);
          }
        }
      }
      messages.decode(b, 1, message.data(), again.data());
      EXPECT_EQ(got, again);
    }
  }
}

}  // namespace
}  // namespace tandem
