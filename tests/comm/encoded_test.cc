// Collectives over wire formats: results are within the formats' bounds of the exact result, with
// the same bits on every rank.
#include <gmock/gmock.h>
#include <xxhash.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <span>

#include "tandem/collectives.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr int64_t kSizes[] = {0, 1, 3, 129, 1021, 4096, 10007, 260003};

float value_at(uint64_t stream, int rank, int64_t i) {
  return float(int32_t(philox(stream, uint64_t(rank), uint64_t(i))[0])) * 0x1p-31f;
}

float load(const Tensor& t, int64_t i) {
  if (t.dtype() == DType::f32) return t.as<float>()[i];
  return t.dtype() == DType::bf16 ? t.as<BFloat16>()[i].to_float() : t.as<Float16>()[i].to_float();
}
void store(const Tensor& t, int64_t i, float x) {
  if (t.dtype() == DType::f32) t.as<float>()[i] = x;
  if (t.dtype() == DType::bf16) t.as<BFloat16>()[i] = BFloat16::from_float(x);
  if (t.dtype() == DType::f16) t.as<Float16>()[i] = Float16::from_float(x);
}

struct Owned {
  Memory buffer;
  Tensor tensor;
  Owned(DType dtype, std::initializer_list<int64_t> shape)
      : buffer(Tensor(nullptr, dtype, shape).bytes()), tensor(buffer.view(dtype, shape)) {}
};

/// Elements [first, ...) of a rank's tensor.
Owned made(DType dtype, std::initializer_list<int64_t> shape, uint64_t stream, int rank,
           int64_t first = 0) {
  Owned owned(dtype, shape);
  for (int64_t i = 0; i < owned.tensor.elements(); ++i) {
    store(owned.tensor, i, value_at(stream, rank, first + i));
  }
  return owned;
}

/// Error bound of the sum of all ranks' values in [-1, 1): each is encoded, and then the sum.
double sum_bound(const Wire& wire, DType dtype, int world) {
  if (world == 1) return 0;
  const double bound = wire.error_bound();
  const double rounding = dtype == DType::f32 ? 0x1p-21 : dtype == DType::bf16 ? 0x1p-7 : 0x1p-10;
  return world * (2 * bound + bound * bound + 2 * rounding);
}

void expect_same_everywhere(Communicator& comm, const Tensor& result) {
  const uint64_t hash = XXH3_64bits(result.data(), result.bytes());
  for (const auto& other : comm.exchange(std::as_bytes(std::span(&hash, 1)), "result")) {
    EXPECT_EQ(std::memcmp(other.data(), &hash, sizeof hash), 0) << result.describe();
  }
}

class EncodedCollectives : public OnRanks {};
TANDEM_INSTANTIATE(EncodedCollectives);

TEST_P(EncodedCollectives, AllReduceIsWithinTheBound) {
  run([&](Communicator& comm) {
    uint64_t stream = 0;
    for (const char* text : {"int8", "int4:g32", "int6", "int5:g64:asym", "mxfp4", "e4m3",
                             "int3:spikes", "int4:hadamard"}) {
      const Wire wire = Wire::parse(text);
      for (const DType dtype : kDTypes) {
        for (const int64_t size : kSizes) {
          if (size > 100000 && (dtype != DType::bf16 || stream > 40)) continue;
          Owned data = made(dtype, {size}, ++stream, comm.rank());
          const double bound = sum_bound(wire, dtype, comm.size());
          all_reduce(comm, data.tensor, wire);
          std::vector<Owned> inputs;
          for (int r = 0; r < comm.size(); ++r) inputs.push_back(made(dtype, {size}, stream, r));
          double worst = 0;
          for (int64_t i = 0; i < size; ++i) {
            double sum = 0;
            for (const Owned& input : inputs) sum += double(load(input.tensor, i));
            worst = std::max(worst, std::fabs(double(load(data.tensor, i)) - sum));
          }
          EXPECT_LE(worst, bound) << text << ", " << size << " of " << name_of(dtype);
          expect_same_everywhere(comm, data.tensor);
        }
      }
    }
  });
}

TEST_P(EncodedCollectives, LosslessAllReduceMatchesTheUncompressedBits) {
  run([&](Communicator& comm) {
    const Wire wire = Wire::parse("lossless");
    uint64_t stream = 500;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t size : kSizes) {
        Owned data = made(dtype, {size}, ++stream, comm.rank());
        Owned expected = made(dtype, {size}, stream, comm.rank());
        all_reduce(comm, data.tensor, wire);
        all_reduce(comm, expected.tensor);
        EXPECT_TRUE(size == 0 ||
                    !std::memcmp(data.tensor.data(), expected.tensor.data(), data.tensor.bytes()))
            << size << " of " << name_of(dtype);
      }
    }
  });
}

TEST_P(EncodedCollectives, ReduceScatterIsWithinTheBound) {
  run([&](Communicator& comm) {
    uint64_t stream = 1000;
    for (const char* text : {"int8", "int4:g32:asym", "mxfp8", "lossless"}) {
      const Wire wire = Wire::parse(text);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const int64_t rows : {0, 1, 5, 577}) {
          for (const int64_t columns : {1, 301}) {
            const Owned data = made(dtype, {rows, columns}, ++stream, comm.rank());
            const Shard local = shard_of(rows, comm.size(), comm.rank());
            Owned shard(dtype, {local.count, columns});
            reduce_scatter(comm, data.tensor, shard.tensor, wire);
            double worst = 0;
            for (int64_t i = 0; i < shard.tensor.elements(); ++i) {
              double sum = 0;
              for (int r = 0; r < comm.size(); ++r) {
                Owned one(dtype, {1});
                store(one.tensor, 0, value_at(stream, r, local.begin * columns + i));
                sum += double(load(one.tensor, 0));
              }
              worst = std::max(worst, std::fabs(double(load(shard.tensor, i)) - sum));
            }
            EXPECT_LE(worst, sum_bound(wire, dtype, comm.size()))
                << text << ", " << rows << " x " << columns << " of " << name_of(dtype);
          }
        }
      }
    }
  });
}

// Processors and compilers differ in the NaN that arithmetic produces: GPU ranks return the
// canonical one.
TEST_P(EncodedCollectives, SumsThatAreNaNHaveOneBitPattern) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;  // one rank encodes nothing
    const Owned data = made(DType::f32, {comm.size(), 300}, 6000, comm.rank());
    float* local_values = data.tensor.as<float>() + 300 * comm.rank();
    local_values[7] = std::bit_cast<float>(0xffc12345u);
    local_values[170] = comm.rank() == 0 ? -NAN : NAN;
    Owned shard(DType::f32, {1, 300});
    reduce_scatter(comm, data.tensor, shard.tensor, Wire::parse("int8"));
    for (const int i : {7, 170}) {
      EXPECT_EQ(std::bit_cast<uint32_t>(load(shard.tensor, i)), 0x7fc00000u) << i;
    }
    EXPECT_FALSE(std::isnan(load(shard.tensor, 8)));
  });
}

TEST_P(EncodedCollectives, AllGatherIsWithinTheBound) {
  run([&](Communicator& comm) {
    uint64_t stream = 2000;
    for (const char* text : {"int8", "int6:g16", "mxfp4", "lossless"}) {
      const Wire wire = Wire::parse(text);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const int64_t rows : {0, 1, 5, 577}) {
          for (const bool in_place : {false, true}) {
            constexpr int64_t kColumns = 301;
            const Shard local = shard_of(rows, comm.size(), comm.rank());
            Owned out(dtype, {rows, kColumns});
            const Owned apart =
                made(dtype, {local.count, kColumns}, ++stream, 0, local.begin * kColumns);
            const Tensor rows_of_rank = out.tensor.rows(local.begin, local.count);
            if (in_place && rows_of_rank.bytes()) {
              std::memcpy(rows_of_rank.data(), apart.tensor.data(), rows_of_rank.bytes());
            }
            all_gather(comm, in_place ? rows_of_rank : apart.tensor, out.tensor, wire);
            const Owned expected = made(dtype, {rows, kColumns}, stream, 0);
            double worst = 0;
            for (int64_t i = 0; i < rows * kColumns; ++i) {
              worst = std::max(
                  worst, std::fabs(double(load(out.tensor, i)) - double(load(expected.tensor, i))));
            }
            const double bound = wire.is_exact() ? 0 : sum_bound(wire, dtype, comm.size());
            EXPECT_LE(worst, bound) << text << ", " << rows << " rows of " << name_of(dtype);
            expect_same_everywhere(comm, out.tensor);
          }
        }
      }
    }
  });
}

TEST_P(EncodedCollectives, AllToAllIsWithinTheBound) {
  run([&](Communicator& comm) {
    uint64_t stream = 3000;
    for (const char* text : {"int8", "int4:g32", "lossless"}) {
      const Wire wire = Wire::parse(text);
      for (const int64_t maximum : {0, 1, 7, 2000}) {
        constexpr int64_t kColumns = 67;
        ++stream;
        const auto count = [&](int from, int to) {
          return maximum * (1 + (from + 2 * to) % 3) / 3;
        };
        std::vector<int64_t> sends, receives;
        for (int r = 0; r < comm.size(); ++r) {
          sends.push_back(count(comm.rank(), r));
          receives.push_back(count(r, comm.rank()));
        }
        int64_t out_rows = 0, in_rows = 0;
        for (const int64_t rows : sends) out_rows += rows;
        for (const int64_t rows : receives) in_rows += rows;
        const Owned send = made(DType::bf16, {out_rows, kColumns}, stream, comm.rank());
        Owned recv(DType::bf16, {in_rows, kColumns});
        all_to_all(comm, send.tensor, sends, recv.tensor, receives, wire);
        int64_t at = 0;
        for (int source = 0; source < comm.size(); ++source) {
          int64_t first = 0;
          for (int to = 0; to < comm.rank(); ++to) first += count(source, to);
          const int64_t rows = receives[size_t(source)];
          const Owned expected =
              made(DType::bf16, {rows, kColumns}, stream, source, first * kColumns);
          double worst = 0;
          for (int64_t i = 0; i < rows * kColumns; ++i, ++at) {
            worst = std::max(
                worst, std::fabs(double(load(recv.tensor, at)) - double(load(expected.tensor, i))));
          }
          const bool is_exact = wire.is_exact() || source == comm.rank();
          EXPECT_LE(worst, is_exact ? 0 : wire.error_bound() + 0x1p-8)
              << text << ", " << rows << " rows from " << source;
        }
      }
    }
  });
}

// With each call's error added to the next call's values, the error of the mean of many sums of the
// same values falls as one over their number.
TEST_P(EncodedCollectives, ErrorFeedbackAveragesToTheExactSum) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    const Wire wire = Wire::parse("int2:g32");
    constexpr int kCalls = 64;
    for (const int64_t size : {int64_t(300), int64_t(40000)}) {
      Owned residual(DType::f32, {size});
      std::vector<double> mean(static_cast<size_t>(size));
      for (int call = 0; call < kCalls; ++call) {
        Owned data = made(DType::f32, {size}, 900, comm.rank());
        all_reduce(comm, data.tensor, wire, &residual.tensor);
        for (int64_t i = 0; i < size; ++i) mean[size_t(i)] += load(data.tensor, i) / double(kCalls);
      }
      double worst = 0;
      for (int64_t i = 0; i < size; ++i) {
        double sum = 0;
        for (int r = 0; r < comm.size(); ++r) sum += double(value_at(900, r, i));
        worst = std::max(worst, std::fabs(mean[size_t(i)] - sum));
      }
      // Remaining residuals of every rank and of the sum's owner, over the calls.
      EXPECT_LE(worst, 6. * comm.size() / kCalls) << size;
      EXPECT_GT(sum_bound(wire, DType::f32, comm.size()), 20. * comm.size() / kCalls);
    }
  });
}

TEST_P(EncodedCollectives, NaNReachesEveryRank) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    for (const int64_t size : {int64_t(1000), int64_t(50000)}) {
      Owned data = made(DType::bf16, {size}, 700, comm.rank());
      if (comm.rank() == comm.size() - 1) store(data.tensor, 300, INFINITY);
      all_reduce(comm, data.tensor, Wire::parse("int8:g32"));
      EXPECT_TRUE(std::isnan(load(data.tensor, 300)));
      EXPECT_TRUE(std::isfinite(load(data.tensor, 300 - 64)));
    }
  });
}

TEST_P(EncodedCollectives, DisagreementIsThrownOnEveryRank) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    for (const int64_t size : {int64_t(100), int64_t(50000)}) {
      Owned data = made(DType::f32, {size}, 800, comm.rank());
      const Wire wire = Wire::parse(comm.rank() == 0 ? "int8" : "int4:g32");
      try {
        all_reduce(comm, data.tensor, wire);
        ADD_FAILURE() << "no error";
      } catch (const Mismatch& error) {
        EXPECT_THAT(error.what(), HasSubstr("as int8"));
        EXPECT_THAT(error.what(), HasSubstr("as int4:g32"));
      }
      all_reduce(comm, data.tensor, Wire::parse("int8"));
    }
  });
}

TEST_P(EncodedCollectives, WrongOperandsAreRefused) {
  run([&](Communicator& comm) {
    Owned data(DType::f32, {100}), half(DType::f16, {100}), integers(DType::i32, {100});
    Owned small(DType::f32, {99});
    const auto refusal = [&](const Tensor& x, const char* text, const Tensor* residual = nullptr) {
      try {
        all_reduce(comm, x, Wire::parse(text), residual);
      } catch (const InvalidArgument& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    EXPECT_THAT(refusal(integers.tensor, "int8"), HasSubstr("dtype i32"));
    EXPECT_THAT(refusal(half.tensor, "lossless"), HasSubstr("dtype f16"));
    EXPECT_THAT(refusal(data.tensor, "int8", &small.tensor), HasSubstr("residual f32[99]"));
    EXPECT_THAT(refusal(data.tensor, "int8", &data.tensor), HasSubstr("residual"));
    EXPECT_THAT(refusal(data.tensor.as_read_only(), "int8"), HasSubstr("read-only"));
    comm.barrier();
  });
}

}  // namespace
}  // namespace tandem::test
