// MoE layer over wire formats on GPU ranks. Encoded rows give the bits of an uncompressed layer on
// the values that the CPU codec decodes; encoded sums give the uncompressed layer's partial sums,
// encoded and decoded by the CPU. Both match the slow reference (f64) on decoded rows, up to the
// error of encoding a partial sum.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "codec/whole.h"
#include "comm/device/signal_kernels.h"
#include "overlap/moe/cuda/layer.h"
#include "tandem/error.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/moe/cuda/gradient_problem.h"
#include "tests/overlap/moe/cuda/shapes.h"

namespace tandem::test {
namespace {

using namespace gpu;

class MoeWires : public OnGpus {};

constexpr const char* kWires[] = {
    "int8",         "int4:g32", "e4m3",          "mxfp8",
    "int6:g64:f32", "mxfp4",    "int4:hadamard", "int2:g64:asym:spikes"};

Wire wire_of(uint64_t number) {
  return Wire::parse(kWires[number % std::size(kWires)]);
}

/// A layer's operands, whose rows may be replaced by their decoded values.
template <class Case>
class WiredCase : public Case {
 public:
  using Case::Case;

  /// Decodes on the host only, which the reference reads; `here`: on the GPU, too. A single rank
  /// encodes nothing.
  void decode_rows(const Wire& wire, bool here) {
    const MoeShape& s = this->shape_;
    if (this->comm_.size() == 1) return;
    std::vector<uint16_t> bits = stored(s.dtype, this->x_);
    std::vector<std::byte> message(wire.bytes(s.hidden, s.dtype));
    for (int64_t row = 0; row < s.tokens; ++row) {
      uint16_t* const values = &bits[size_t(row * s.hidden)];
      codec::encode_whole(wire, s.dtype, values, s.hidden, message.data());
      codec::decode_whole(wire, message, s.dtype, values, s.hidden);
    }
    this->x_ = loaded(s.dtype, bits);
    if (here) this->write(this->x_on_, bits);
  }

  /// Keeps the routing weights of experts on rank `holder` and sets the others to 0; -1: keeps all.
  void weigh_only(int holder) {
    std::vector<float> weights = this->weights_;
    for (size_t i = 0; i < this->chosen_.size() && holder >= 0; ++i) {
      if (this->coords_.grid.holder(this->chosen_[i]) != holder) weights[i] = 0;
    }
    this->write(this->weights_on_, weights);
  }
  bool target_of(int64_t row, int holder) const {
    const auto first = this->chosen_.begin() + row * this->shape_.top_k;
    return std::any_of(first, first + this->shape_.top_k,
                       [&](int32_t e) { return this->coords_.grid.holder(e) == holder; });
  }
  int64_t rows() const { return this->rows_; }

  /// Contribution of `rank` to this rank's rows, in f64.
  std::vector<double> partial(int rank) const {
    const MoeShape& s = this->shape_;
    const Shard shard = shard_of(s.ffn, s.tp, rank % s.tp);
    std::vector<float> weights(this->weights_.begin(),
                               this->weights_.begin() + this->rows_ * s.top_k);
    for (size_t i = 0; i < weights.size(); ++i) {
      if (this->coords_.grid.holder(this->chosen_[i]) != rank / s.tp * s.tp) weights[i] = 0;
    }
    std::vector<float> in, out;
    for (int64_t e = 0; e < s.experts; ++e) {
      for (const int64_t half : {0, 1}) {
        const auto begin = this->w_in_.begin() + ((e * 2 + half) * s.ffn + shard.begin) * s.hidden;
        in.insert(in.end(), begin, begin + shard.count * s.hidden);
      }
      for (int64_t h = 0; h < s.hidden; ++h) {
        const auto begin = this->w_out_.begin() + (e * s.hidden + h) * s.ffn + shard.begin;
        out.insert(out.end(), begin, begin + shard.count);
      }
    }
    return moe_reference({.rows = this->rows_,
                          .hidden = s.hidden,
                          .ffn = shard.count,
                          .experts = s.experts,
                          .top_k = s.top_k,
                          .chosen = this->chosen_,
                          .weights = weights,
                          .x = {this->x_.data(), size_t(this->rows_ * s.hidden)},
                          .w_in = in,
                          .w_out = out});
  }

  /// Allows for rounding, as uncompressed, and for encoding the other ranks' partial sums: a
  /// fraction of each group's maximum.
  void expect_right_as(const Wire& combine, const std::vector<float>& found,
                       const std::string& what) const {
    const MoeShape& s = this->shape_;
    const std::vector<double> expected = this->expected();
    ASSERT_EQ(expected.size(), found.size()) << what;
    std::vector<double> allowed(expected.size(), 0.0), total = allowed;
    for (int rank = 0; rank < this->comm_.size(); ++rank) {
      const std::vector<double> sums = partial(rank);
      for (size_t i = 0; i < sums.size(); ++i) total[i] += sums[i];
      if (rank == this->rank_) continue;
      for (int64_t first = 0; first < int64_t(sums.size());) {
        const int64_t left = s.hidden - first % s.hidden,
                      count =
                          std::min<int64_t>(combine.group - first % s.hidden % combine.group, left);
        double maximum = 0;
        for (int64_t i = first; i < first + count; ++i) {
          maximum = std::max(maximum, std::abs(sums[size_t(i)]));
        }
        for (int64_t i = first; i < first + count; ++i) {
          allowed[size_t(i)] += combine.error_bound() * maximum * 1.02;  // they are rounded before
        }
        first += count;
      }
    }
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    const double rounding = 2 * 1.5 * (s.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) * largest;
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(total[i], expected[i], 1e-9 * (1 + largest)) << what << " at " << i;
      ASSERT_LE(std::abs(double(found[i]) - expected[i]), allowed[i] + rounding)
          << what << " at " << i;
    }
  }
};

using Wired = WiredCase<MoeCase>;

void pause(GpuCommunicator& comm, uint64_t number) {
  const uint32_t delay = philox(9, uint64_t(comm.rank()), number)[0] % 40000;
  if (delay < 20000) launch_pause(delay, comm.stream());
}

template <class Case>
std::vector<uint16_t> bits_of(MoeOnGpus& layer, size_t candidate, const Case& p) {
  p.poison();
  layer.run(candidate, p.x(), p.routing(), p.w_in, p.w_out, p.out());
  return p.template result<uint16_t>();
}
template <class Case>
std::vector<float> floats_of(MoeOnGpus& layer, size_t candidate, const Case& p) {
  p.poison();
  layer.run(candidate, p.x(), p.routing(), p.w_in, p.w_out, p.out(DType::f32));
  return p.template result<float>();
}

TEST_P(MoeWires, RowsMatchAnUncompressedLayerOnDecodedRows) {
  run(
      [&](GpuCommunicator& comm) {
        uint64_t number = 0;
        for (const MoeShape& s : shapes(comm.size())) {
          const Wire wire = wire_of(number);
          MoeOnGpus layer(comm, s, {.dispatch = wire}, Choosing::first);
          MoeOnGpus uncompressed(comm, s, {.strategy = Strategy::serial}, Choosing::first);
          Wired problem(comm, s), decoded(comm, s);
          decoded.decode_rows(wire, true);
          for (const MoeRoutes& load : loads(comm.size())) {
            problem.route(load, ++number);
            decoded.route(load, number);
            const auto expected = bits_of(uncompressed, 0, decoded);
            for (const size_t candidate :
                 {size_t(0), number % layer.candidates().size(), layer.candidates().size() - 1}) {
              pause(comm, number);
              EXPECT_EQ(bits_of(layer, candidate, problem), expected)
                  << describe(s) << ", " << load.name << ", " << layer.candidates()[candidate].name;
            }
            if (testing::Test::HasFailure()) return comm.abort("a result is wrong");
          }
        }
      },
      30);
}

// Without TP a rank's partial sum is that of the uncompressed layer with the routing weights of
// other ranks' experts set to 0.
TEST_P(MoeWires, SumsMatchThoseOfDecodedPartialSums) {
  run(
      [&](GpuCommunicator& comm) {
        uint64_t number = 0;
        const auto all_loads = loads(comm.size());
        for (const MoeShape& s : shapes(comm.size())) {
          if (s.tp > 1) continue;
          const Wire wire = wire_of(++number);
          MoeOnGpus layer(comm, s, {.combine = wire}, Choosing::first);
          MoeOnGpus uncompressed(comm, s, {.strategy = Strategy::serial}, Choosing::first);
          Wired problem(comm, s);
          problem.route(all_loads[number % all_loads.size()], number);
          const auto rows = size_t(problem.rows()), hidden = size_t(s.hidden);
          std::vector<float> expected(rows * hidden, 0.0f);
          std::vector<std::byte> message(wire.bytes(s.hidden, s.dtype));
          for (int rank = 0; rank < comm.size(); ++rank) {
            problem.weigh_only(rank);
            std::vector<float> sums = floats_of(uncompressed, 0, problem);
            for (size_t row = 0; row < rows; ++row) {
              if (!problem.target_of(int64_t(row), rank)) continue;
              float* const of_row = &sums[row * hidden];
              if (rank != comm.rank()) {
                const std::vector<uint16_t> bits =
                    stored(s.dtype, std::vector<float>(of_row, of_row + hidden));
                codec::encode_whole(wire, s.dtype, bits.data(), s.hidden, message.data());
                codec::decode_whole(wire, message, DType::f32, of_row, s.hidden);
              }
              for (size_t i = 0; i < hidden; ++i) expected[row * hidden + i] += of_row[i];
            }
          }
          problem.weigh_only(-1);
          for (size_t candidate = 0; candidate < layer.candidates().size(); ++candidate) {
            const std::string what = describe(s) + ", " + layer.candidates()[candidate].name;
            pause(comm, 100 * number + candidate);
            EXPECT_EQ(floats_of(layer, candidate, problem), expected) << what;
            EXPECT_EQ(loaded(s.dtype, bits_of(layer, candidate, problem)),
                      loaded(s.dtype, stored(s.dtype, expected)))
                << what;
          }
          if (testing::Test::HasFailure()) return comm.abort("a result is wrong");
        }
      },
      30);
}

TEST_P(MoeWires, DispatchAndCombineTogetherMatchReference) {
  run(
      [&](GpuCommunicator& comm) {
        uint64_t number = 0;
        const auto all_loads = loads(comm.size());
        for (const MoeShape& s : shapes(comm.size())) {
          const Wire there = wire_of(number), back = Wire::parse(number % 2 ? "int8" : "int4:g32");
          MoeOnGpus layer(comm, s, {.dispatch = there, .combine = back}, Choosing::first);
          Wired problem(comm, s);
          problem.decode_rows(there, false);
          problem.route(all_loads[number % all_loads.size()], number + 50);
          const std::string what = describe(s) + ", " + layer.candidates()[0].name;
          const auto bits = bits_of(layer, 0, problem);
          problem.expect_right_as(back, loaded(s.dtype, bits), what);
          const size_t other = number++ % layer.candidates().size();
          pause(comm, number);
          EXPECT_EQ(bits_of(layer, other, problem), bits)
              << what << " against " << layer.candidates()[other].name;
          if (testing::Test::HasFailure()) return comm.abort("a result is wrong");
        }
      },
      60);
}

// Gradients are not encoded.
TEST_P(MoeWires, GradientsMatchThoseOfDecodedRows) {
  run(
      [&](GpuCommunicator& comm) {
        uint64_t number = 0;
        const auto all_loads = loads(comm.size());
        for (const MoeShape& s : shapes(comm.size())) {
          const Wire wire = wire_of(number);
          MoeOnGpus layer(comm, s, {.dispatch = wire, .combine = wire, .backward = true},
                          Choosing::first);
          MoeOnGpus uncompressed(comm, s, {.strategy = Strategy::serial, .backward = true},
                                 Choosing::first);
          WiredCase<MoeGradientCase> problem(comm, s), decoded(comm, s);
          decoded.decode_rows(wire, true);
          const auto saved = layer.make_saved(), of_uncompressed = uncompressed.make_saved();
          const MoeRoutes& load = all_loads[number % all_loads.size()];
          problem.route(load, ++number);
          decoded.route(load, number);
          const auto gradients = [&](MoeOnGpus& by, size_t candidate, const auto& p,
                                     MoeSavedActivations& in) {
            p.poison();
            p.reset();
            pause(comm, number);
            by.run(candidate, p.x(), p.routing(), p.w_in, p.w_out, p.out(), &in);
            p.run_backward(by, in, candidate % by.backward_candidates().size());
            return p.found();
          };
          const auto expected = gradients(uncompressed, 0, decoded, *of_uncompressed);
          for (const size_t candidate : {size_t(0), layer.candidates().size() - 1}) {
            EXPECT_TRUE(gradients(layer, candidate, problem, *saved) == expected)
                << describe(s) << ", " << load.name << ", " << layer.candidates()[candidate].name;
          }
          if (testing::Test::HasFailure()) return comm.abort("a gradient is wrong");
        }
      },
      60);
}

MoeShape small(int world) {
  return {.tokens = 50,
          .hidden = 776,
          .ffn = 64,
          .experts = 2 * world,
          .top_k = 2,
          .dtype = DType::bf16};
}

TEST_P(MoeWires, OneGraphServesManyRoutings) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = small(comm.size());
    MoeOnGpus layer(comm, s, {.dispatch = Wire::parse("int8"), .combine = Wire::parse("int4:g32")},
                    Choosing::first, true);
    Wired problem(comm, s);
    problem.route({}, 1);  // all rows, the same number in every call
    std::vector<CapturedCalls> graphs;
    for (const size_t candidate :
         {size_t(0), layer.candidates().size() / 2, layer.candidates().size() - 1}) {
      graphs.emplace_back(comm, [&, candidate] {
        layer.run(candidate, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                  problem.out());
      });
    }
    for (uint64_t routing = 0; routing < 60; ++routing) {
      problem.route({.imbalance = routing % 3 == 0 ? 0.0 : double(routing % 3)}, routing + 2);
      const auto expected = bits_of(layer, 0, problem);
      for (const CapturedCalls& graph : graphs) {
        problem.poison();
        pause(comm, routing);
        graph.launch();
        ASSERT_EQ(problem.result<uint16_t>(), expected) << "routing " << routing;
      }
    }
  });
}

// Uncompressed and encoded calls lay out the same memory differently.
TEST_P(MoeWires, UncompressedAndEncodedCallsAlternate) {
  run([](GpuCommunicator& comm) {
    for (const int64_t hidden : {8, 776}) {  // messages longer than rows, and shorter
      MoeShape s = small(comm.size());
      s.hidden = hidden;
      const Wire wire = Wire::parse("int4");
      MoeOnGpus layer(comm, s, {.dispatch = wire, .combine = wire, .allow_uncompressed = true},
                      Choosing::first, true);
      Wired problem(comm, s), other(comm, s);
      problem.route({.imbalance = 0}, 1);
      other.route({.one_holder = true}, 2);
      const size_t last = layer.candidates().size() - 1;
      EXPECT_FALSE(layer.candidates()[0].encoded);
      EXPECT_EQ(layer.candidates()[last].encoded, comm.size() > 1);
      std::vector<uint16_t> bits[2][2];  // by case, and whether encoded
      for (const size_t encoded : {0, 1}) {
        bits[0][encoded] = bits_of(layer, encoded ? last : 0, problem);
        bits[1][encoded] = bits_of(layer, encoded ? last : 0, other);
      }
      for (uint64_t i = 0; i < 120; ++i) {
        const auto draw = philox(7, 0, i);
        pause(comm, i);
        const size_t candidate = draw[1] % layer.candidates().size();
        const size_t encoded = comm.size() > 1 && layer.candidates()[candidate].encoded;
        Wired& p = draw[0] % 2 ? other : problem;
        ASSERT_EQ(bits_of(layer, candidate, p), bits[draw[0] % 2][encoded])
            << i << ", " << layer.candidates()[candidate].name;
      }
    }
  });
}

TEST_P(MoeWires, PublicLayerAcceptsWireFormats) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = small(comm.size());
    const Wire there = Wire::parse("int8"), back = Wire::parse("int4:g32");
    Wired problem(comm, s);
    problem.route({.imbalance = 0}, 3);
    MoeOnGpus direct(comm, s, {.dispatch = there, .combine = back}, Choosing::first);
    const auto expected = bits_of(direct, 0, problem);
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
      MoeLayer layer(comm, s, {.strategy = strategy, .dispatch = there, .combine = back});
      MoeBatch batch;
      problem.poison();
      layer.forward(problem.x(), problem.routing(), problem.w_in, problem.w_out, problem.out(),
                    batch);
      EXPECT_EQ(problem.result<uint16_t>(), expected) << name_of(strategy);
    }
    const MoeOptions both{.dispatch = there, .combine = back, .allow_uncompressed = true};
    MoeLayer either(comm, s, both);
    MoeOnGpus uncompressed(comm, s, {.strategy = Strategy::serial}, Choosing::first);
    const auto of_uncompressed = bits_of(uncompressed, 0, problem);
    MoeBatch batch;
    problem.poison();
    either.forward(problem.x(), problem.routing(), problem.w_in, problem.w_out, problem.out(),
                   batch);
    const auto found = problem.result<uint16_t>();
    EXPECT_TRUE(found == of_uncompressed || found == expected);
    EXPECT_EQ(of_uncompressed == expected, comm.size() == 1);
    const auto refused = [&](const MoeOptions& options, const char* named) {
      try {
        MoeLayer(comm, s, options);
        ADD_FAILURE() << named;
      } catch (const Unsupported& error) {
        EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
      }
    };
    refused({.dispatch = {Codec::lossless}}, "moe dispatch: codec lossless");
    refused({.combine = {Codec::lossless}}, "moe combine: codec lossless");
    EXPECT_THROW(MoeLayer(comm, s, {.combine = {Codec::int8, 48}}), InvalidArgument);
    if (comm.size() == 1) return;
    EXPECT_THROW(MoeLayer(comm, s, {.combine = comm.rank() == 0 ? there : back}), Mismatch);
    EXPECT_THROW(MoeLayer(comm, s, {.dispatch = comm.rank() == 0 ? there : Wire{}}), Mismatch);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeWires, testing::Values(1, 2, 3, 4, 8), gpus_name);

class MoeWiresLostRank : public OnGpus {};

TEST_P(MoeWiresLostRank, LostRankIsNamed) {
  struct Called {
    bool serial, sorts;
  };
  for (const Called& how : {Called{true, false}, {false, false}, {false, true}}) {
    const auto error = timeout_without_last([&](GpuCommunicator& comm) {
      return call_of_layer(comm, small(comm.size()),
                           {.dispatch = Wire::parse("int8"), .combine = Wire::parse("int8")},
                           how.serial, how.sorts);
    });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->op, "all_to_all");
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeWiresLostRank, testing::Values(2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
