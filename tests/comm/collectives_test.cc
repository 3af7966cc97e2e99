// Every collective without a wire format, compared with a reference that computes the whole world's
// data on each rank.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "tandem/collectives.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;

// Element i of rank r's tensor `stream`, in [-8, 8). A multiplicative hash, as the references
// compute many of these.
float value_at(uint64_t stream, int r, int64_t i) {
  const uint64_t key = (stream * 64 + uint64_t(r)) * 0x9e3779b97f4a7c15ull + uint64_t(i);
  const uint64_t hash = (key ^ (key >> 29)) * 0xbf58476d1ce4e5b9ull;
  return float(hash >> 40) * 0x1p-20f - 8;
}

void store(const Tensor& t, int64_t i, float x) {
  switch (t.dtype()) {
    case DType::f32:
      t.as<float>()[i] = x;
      return;
    case DType::bf16:
      t.as<BFloat16>()[i] = BFloat16::from_float(x);
      return;
    case DType::f16:
      t.as<Float16>()[i] = Float16::from_float(x);
      return;
    case DType::i32:
      t.as<int32_t>()[i] = int32_t(x * 100000);
      return;
    case DType::u8:
      t.as<uint8_t>()[i] = uint8_t(int(x * 16) & 0xff);
      return;
    case DType::e4m3:
      t.as<Float8E4M3>()[i] = Float8E4M3::from_float(x);
      return;
  }
}

double load(const Tensor& t, int64_t i) {
  switch (t.dtype()) {
    case DType::f32:
      return t.as<float>()[i];
    case DType::bf16:
      return t.as<BFloat16>()[i].to_float();
    case DType::f16:
      return t.as<Float16>()[i].to_float();
    case DType::i32:
      return t.as<int32_t>()[i];
    case DType::u8:
      return t.as<uint8_t>()[i];
    case DType::e4m3:
      return t.as<Float8E4M3>()[i].to_float();
  }
  return 0;
}

// Tensor that owns its memory.
struct Owned {
  Memory buffer;
  Tensor tensor;
  Owned(DType dtype, std::initializer_list<int64_t> shape)
      : buffer(Tensor(nullptr, dtype, shape).bytes()), tensor(buffer.view(dtype, shape)) {}
};

// Elements [first, ...) of rank r's tensor `stream`.
void fill(const Tensor& t, uint64_t stream, int r, int64_t first = 0) {
  for (int64_t i = 0; i < t.elements(); ++i) store(t, i, value_at(stream, r, first + i));
}

Owned made(DType dtype, std::initializer_list<int64_t> shape, uint64_t stream, int r,
           int64_t first = 0) {
  Owned owned(dtype, shape);
  fill(owned.tensor, stream, r, first);
  return owned;
}

// The reduction over ranks 0, 1, ... in f32 (i32 for i32), rounded once.
Owned reduced(DType dtype, int64_t count, uint64_t stream, int world, ReduceOp op) {
  Owned result(dtype, {count});
  std::vector<Owned> inputs;
  for (int r = 0; r < world; ++r) inputs.push_back(made(dtype, {count}, stream, r));
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == DType::i32) {
      int32_t sum = inputs[0].tensor.as<int32_t>()[i];
      for (int r = 1; r < world; ++r) {
        const int32_t x = inputs[size_t(r)].tensor.as<int32_t>()[i];
        sum = op == ReduceOp::sum ? sum + x : std::max(sum, x);
      }
      result.tensor.as<int32_t>()[i] = sum;
      continue;
    }
    float sum = float(load(inputs[0].tensor, i));
    for (int r = 1; r < world; ++r) {
      const float x = float(load(inputs[size_t(r)].tensor, i));
      sum = op == ReduceOp::sum ? sum + x : std::max(sum, x);
    }
    store(result.tensor, i, sum);
  }
  return result;
}

testing::AssertionResult same_bytes(const Tensor& got, const void* expected) {
  const auto* a = got.as<const std::byte>();
  const auto* b = static_cast<const std::byte*>(expected);
  for (size_t i = 0; i < got.bytes(); ++i) {
    if (a[i] == b[i]) continue;
    return testing::AssertionFailure() << got.describe() << " differs at byte " << i;
  }
  return testing::AssertionSuccess();
}

constexpr DType kReducible[] = {DType::f32, DType::bf16, DType::f16, DType::i32};
// Empty, one element, fewer than ranks, one envelope, one chunk, many chunks with tails.
constexpr int64_t kSizes[] = {0, 1, 3, 1021, 10007, 260003};

class Collectives : public OnRanks {
 protected:
  // Tests the largest size only for one dtype and operation: the others share its code path.
  static bool worth(DType dtype, ReduceOp op, int64_t size) {
    return size < 100000 || (dtype == DType::bf16 && op == ReduceOp::sum);
  }
};
TANDEM_INSTANTIATE(Collectives);

TEST_P(Collectives, AllReduceMatchesReference) {
  run([&](Communicator& comm) {
    uint64_t stream = 0;
    for (const DType dtype : kReducible) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
        for (const int64_t size : kSizes) {
          if (!worth(dtype, op, size)) continue;
          Owned data = made(dtype, {size}, ++stream, comm.rank());
          all_reduce(comm, data.tensor, op);
          const Owned expected = reduced(dtype, size, stream, comm.size(), op);
          ASSERT_TRUE(same_bytes(data.tensor, expected.tensor.data())) << size;
        }
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterMatchesReference) {
  run([&](Communicator& comm) {
    uint64_t stream = 100;
    for (const DType dtype : kReducible) {
      for (const int64_t rows : {int64_t(0), int64_t(1), int64_t(3), int64_t(577)}) {
        for (const int64_t columns : {int64_t(0), int64_t(1), int64_t(5), int64_t(301)}) {
          const Owned data = made(dtype, {rows, columns}, ++stream, comm.rank());
          const Shard local = shard_of(rows, comm.size(), comm.rank());
          Owned shard(dtype, {local.count, columns});
          reduce_scatter(comm, data.tensor, shard.tensor);
          const Owned expected = reduced(dtype, rows * columns, stream, comm.size(), ReduceOp::sum);
          ASSERT_TRUE(same_bytes(shard.tensor, expected.buffer.data() +
                                                   size_t(local.begin * columns) * size_of(dtype)))
              << rows << " x " << columns;
        }
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterMayWriteToItsOwnRows) {
  run([&](Communicator& comm) {
    uint64_t stream = 150;
    for (const int64_t rows : {int64_t(1), int64_t(3), int64_t(577)}) {
      for (const int64_t columns : {int64_t(1), int64_t(301)}) {
        const Owned data = made(DType::f32, {rows, columns}, ++stream, comm.rank());
        const Shard local = shard_of(rows, comm.size(), comm.rank());
        reduce_scatter(comm, data.tensor, data.tensor.rows(local.begin, local.count));
        const Owned expected =
            reduced(DType::f32, rows * columns, stream, comm.size(), ReduceOp::sum);
        for (int64_t i = 0; i < data.tensor.elements(); ++i) {
          const bool is_local =
              i / columns >= local.begin && i / columns < local.begin + local.count;
          ASSERT_EQ(data.tensor.as<float>()[i],
                    is_local ? expected.tensor.as<float>()[i] : value_at(stream, comm.rank(), i));
        }
      }
    }
  });
}

TEST_P(Collectives, OtherOverlapsAreRefused) {
  run([&](Communicator& comm) {
    const Owned data(DType::f32, {12, 5});
    const Shard local = shard_of(12, comm.size(), comm.rank());
    auto* shifted = data.tensor.as<float>() + local.begin * 5 + (comm.rank() ? -2 : 3);
    const Tensor shard(shifted, DType::f32, {local.count, 5});
    EXPECT_THROW(reduce_scatter(comm, data.tensor, shard), InvalidArgument);
    EXPECT_THROW(all_gather(comm, shard, data.tensor), InvalidArgument);
    comm.barrier();
  });
}

TEST_P(Collectives, AllGatherMatchesReference) {
  run([&](Communicator& comm) {
    uint64_t stream = 200;
    for (const DType dtype : {DType::f32, DType::bf16, DType::u8}) {
      for (const int64_t rows : {int64_t(0), int64_t(1), int64_t(3), int64_t(403)}) {
        for (const int64_t columns : {int64_t(0), int64_t(1), int64_t(5), int64_t(1201)}) {
          if (rows * columns > 10000 && dtype != DType::f32) continue;
          for (const bool in_place : {false, true}) {
            const Owned expected = made(dtype, {rows, columns}, ++stream, 0);
            const Shard local = shard_of(rows, comm.size(), comm.rank());
            Owned out(dtype, {rows, columns});
            const Owned apart(dtype, {local.count, columns});
            const Tensor shard =
                in_place ? out.tensor.rows(local.begin, local.count) : apart.tensor;
            fill(shard, stream, 0, local.begin * columns);
            all_gather(comm, shard, out.tensor);
            ASSERT_TRUE(same_bytes(out.tensor, expected.tensor.data())) << rows << " x " << columns;
          }
        }
      }
    }
  });
}

TEST_P(Collectives, BroadcastSendsTheRootsData) {
  run([&](Communicator& comm) {
    uint64_t stream = 300;
    for (int root = 0; root < comm.size(); ++root) {
      for (const int64_t size : kSizes) {
        const Owned expected = made(DType::u8, {size}, ++stream, root);
        Owned data = made(DType::u8, {size}, stream, comm.rank());
        broadcast(comm, data.tensor, root);
        ASSERT_TRUE(same_bytes(data.tensor, expected.tensor.data())) << size;
      }
    }
  });
}

// Number of rows sent from `from` to `to`: none, an envelope or many chunks.
int64_t rows_between(int round, int from, int to) {
  const int64_t choices[] = {0, 1, 7, 130, 5003};
  return choices[philox(9, uint64_t(round), uint64_t(from * 16 + to))[0] % 5];
}

TEST_P(Collectives, AllToAllMatchesReference) {
  run([&](Communicator& comm) {
    constexpr int64_t kColumns = 33;
    for (int round = 0; round < 12; ++round) {
      std::vector<int64_t> sends, receives;
      for (int r = 0; r < comm.size(); ++r) {
        sends.push_back(rows_between(round, comm.rank(), r));
        receives.push_back(rows_between(round, r, comm.rank()));
      }
      const auto total = [](const std::vector<int64_t>& v) {
        return std::accumulate(v.begin(), v.end(), int64_t(0));
      };
      Owned send(DType::f32, {total(sends), kColumns});
      Owned recv(DType::f32, {total(receives), kColumns});
      int64_t at = 0;
      for (int r = 0; r < comm.size(); ++r) {
        fill(send.tensor.rows(at, sends[size_t(r)]), uint64_t(400 + r), comm.rank());
        at += sends[size_t(r)];
      }
      all_to_all(comm, send.tensor, sends, recv.tensor, receives);
      at = 0;
      for (int r = 0; r < comm.size(); ++r) {
        const Owned expected =
            made(DType::f32, {receives[size_t(r)], kColumns}, uint64_t(400 + comm.rank()), r);
        ASSERT_TRUE(same_bytes(recv.tensor.rows(at, receives[size_t(r)]), expected.tensor.data()));
        at += receives[size_t(r)];
      }
    }
  });
}

TEST_P(Collectives, MessagesArriveInOrder) {
  run([&](Communicator& comm) {
    for (int from = 0; from < comm.size(); ++from) {
      const int to = (from + 1) % comm.size();
      if (from == to) continue;
      uint64_t stream = 500;
      for (const int64_t size : kSizes) {
        ++stream;
        if (comm.rank() == from) {
          send(comm, made(DType::f16, {size}, stream, from).tensor, to);
        } else if (comm.rank() == to) {
          Owned data(DType::f16, {size});
          recv(comm, data.tensor, from);
          const Owned expected = made(DType::f16, {size}, stream, from);
          ASSERT_TRUE(same_bytes(data.tensor, expected.tensor.data())) << size;
        }
      }
    }
    comm.barrier();
  });
}

// A message may stay pending during collectives.
TEST_P(Collectives, SendIsIndependentOfCollectives) {
  if (ranks() == 1) GTEST_SKIP() << "needs two ranks";
  run([&](Communicator& comm) {
    float message = 42, sum = 1;
    if (comm.rank() == 0) send(comm, Tensor(&message, DType::f32, {1}), 1);
    all_reduce(comm, Tensor(&sum, DType::f32, {1}));
    EXPECT_EQ(sum, float(comm.size()));
    if (comm.rank() == 1) {
      float got = 0;
      recv(comm, Tensor(&got, DType::f32, {1}), 0);
      EXPECT_EQ(got, 42);
    }
    comm.barrier();
  });
}

TEST_P(Collectives, RecvOfAnotherSizeIsAMismatchAndLosesNothing) {
  if (ranks() == 1) GTEST_SKIP() << "needs two ranks";
  run([&](Communicator& comm) {
    Owned big(DType::f32, {300000}), small(DType::f32, {2});
    if (comm.rank() == 0) {
      send(comm, big.tensor, 1);
      small.tensor.as<float>()[1] = 5;
      send(comm, small.tensor, 1);
    } else if (comm.rank() == 1) {
      try {
        recv(comm, small.tensor, 0);
        FAIL();
      } catch (const Mismatch& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 0 sends 300000 elements of f32, rank 1 expects"));
      }
      recv(comm, small.tensor, 0);
      EXPECT_EQ(small.tensor.as<float>()[1], 5);
    }
    comm.barrier();
  });
}

// On any disagreement every rank throws Mismatch, and the next call works.
TEST_P(Collectives, DisagreementIsThrownOnEveryRank) {
  if (ranks() == 1) GTEST_SKIP() << "needs two ranks";
  run([&](Communicator& comm) {
    const bool odd = comm.rank() == comm.size() - 1;
    const auto data = [](DType dtype, int64_t n) { return Owned(dtype, {n}); };
    const auto expect_mismatch = [&](const char* text, const auto& call) {
      try {
        call();
        ADD_FAILURE() << "expected a Mismatch: " << text;
      } catch (const Mismatch& error) {
        EXPECT_THAT(error.what(), HasSubstr(text));
      }
      Owned next = made(DType::f32, {50000}, 7, comm.rank());
      all_reduce(comm, next.tensor);
      const Owned expected = reduced(DType::f32, 50000, 7, comm.size(), ReduceOp::sum);
      ASSERT_TRUE(same_bytes(next.tensor, expected.tensor.data())) << "after " << text;
    };
    for (const int64_t n : {int64_t(10), int64_t(200000)}) {
      expect_mismatch("f32[", [&] { all_reduce(comm, data(DType::f32, odd ? n + 1 : n).tensor); });
      expect_mismatch("bf16[",
                      [&] { all_reduce(comm, data(odd ? DType::bf16 : DType::f32, n).tensor); });
      expect_mismatch("all_reduce max", [&] {
        all_reduce(comm, data(DType::f32, n).tensor, odd ? ReduceOp::max : ReduceOp::sum);
      });
      expect_mismatch("from root 1",
                      [&] { broadcast(comm, data(DType::f32, n).tensor, odd ? 1 : 0); });
      expect_mismatch("calls broadcast", [&] {
        const Owned both = data(DType::f32, n);
        odd ? broadcast(comm, both.tensor, 0) : all_reduce(comm, both.tensor);
      });
      expect_mismatch("all_gather f32[", [&] {
        const int64_t rows = odd ? n + comm.size() : n;
        all_gather(comm, data(DType::f32, shard_of(rows, comm.size(), comm.rank()).count).tensor,
                   data(DType::f32, rows).tensor);
      });
      expect_mismatch("which expects", [&] {
        std::vector<int64_t> counts(size_t(comm.size()), n);
        const Owned out = data(DType::f32, n * comm.size()),
                    in = data(DType::f32, 2 * n * comm.size());
        std::vector<int64_t> expected = counts;
        if (odd) expected[0] = n + 1;
        all_to_all(comm, out.tensor, counts, in.tensor, expected);
      });
    }
  });
}

TEST_P(Collectives, WrongTensorsAreRefusedBeforeAnythingIsSent) {
  run([&](Communicator& comm) {
    const Owned a(DType::f32, {4, 6}), bytes(DType::u8, {4});
    const auto columns = a.tensor.transposed();
    EXPECT_THROW(all_reduce(comm, columns), InvalidArgument);
    EXPECT_THROW(all_reduce(comm, bytes.tensor), InvalidArgument);
    EXPECT_THROW(broadcast(comm, a.tensor, comm.size()), InvalidArgument);
    EXPECT_THROW(broadcast(comm, a.tensor, -1), InvalidArgument);
    EXPECT_THROW(send(comm, a.tensor, comm.rank()), InvalidArgument);
    EXPECT_THROW(recv(comm, a.tensor, comm.size()), InvalidArgument);
    EXPECT_THROW(all_gather(comm, a.tensor.rows(0, 0), a.tensor), InvalidArgument);
    EXPECT_THROW(reduce_scatter(comm, a.tensor, bytes.tensor), InvalidArgument);
    const std::vector<int64_t> too_many(size_t(comm.size()), 5), negative(size_t(comm.size()), -1);
    EXPECT_THROW(all_to_all(comm, a.tensor, too_many, a.tensor, too_many), InvalidArgument);
    EXPECT_THROW(all_to_all(comm, a.tensor, negative, a.tensor, negative), InvalidArgument);
    EXPECT_THROW(all_to_all(comm, a.tensor, {}, a.tensor, {}), InvalidArgument);
    comm.barrier();
  });
}

// Thousands of calls of varying kind and size with random delays give correct sums.
TEST_P(Collectives, BackToBackCallsGiveCorrectSums) {
  run([&](Communicator& comm) {
    const int world = comm.size();
    Owned buffer(DType::i32, {9001});
    auto* x = buffer.tensor.as<int32_t>();
    for (int call = 0; call < 3000; ++call) {
      const auto draw = philox(3, 3, uint64_t(call));
      const int64_t n = call % 50 == 0 ? 9001 : int64_t(draw[0] % 200);
      const Tensor data(x, DType::i32, {n});
      const int base = call * 7;
      if (draw[2] % 97 == uint32_t(comm.rank())) {
        std::this_thread::sleep_for(std::chrono::microseconds(draw[3] % 300));
      }
      switch (draw[1] % 4) {
        case 0:
          for (int64_t i = 0; i < n; ++i) x[i] = base + int(i) + comm.rank();
          all_reduce(comm, data);
          for (int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(x[i], world * (base + int(i)) + world * (world - 1) / 2) << call;
          }
          break;
        case 1: {
          const Shard local = shard_of(n, world, comm.rank());
          for (int64_t i = 0; i < n; ++i) x[i] = -1;
          for (int64_t i = 0; i < local.count; ++i)
            x[local.begin + i] = base + int(local.begin + i);
          all_gather(comm, data.rows(local.begin, local.count), data);
          for (int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], base + int(i)) << call;
          break;
        }
        case 2: {
          const int root = int(draw[2] % uint32_t(world));
          for (int64_t i = 0; i < n; ++i) x[i] = base + int(i) + comm.rank();
          broadcast(comm, data, root);
          for (int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], base + int(i) + root) << call;
          break;
        }
        case 3: {
          const Shard local = shard_of(n, world, comm.rank());
          for (int64_t i = 0; i < n; ++i) x[i] = base + int(i) + comm.rank();
          reduce_scatter(comm, data, data.rows(local.begin, local.count), ReduceOp::max);
          for (int64_t i = local.begin; i < local.begin + local.count; ++i) {
            ASSERT_EQ(x[i], base + int(i) + world - 1) << call;
          }
          break;
        }
      }
    }
  });
}

// Order-dependent sums have the same bits on every rank and in every run.
TEST_P(Collectives, SumsAreBitwiseEqualOverRanksAndRuns) {
  std::vector<std::byte> first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    run([&](Communicator& comm) {
      Owned data = made(DType::f32, {70001}, 77, comm.rank());
      all_reduce(comm, data.tensor);
      const std::span<const std::byte> local(data.buffer.data(), data.buffer.bytes());
      const auto all = comm.exchange(local.subspan(0, 20000), "sums");
      for (const auto& remote : all) ASSERT_EQ(remote, all[0]);
      if (comm.rank() != 0 && !mpi_world()) return;
      if (first.empty()) first.assign(local.begin(), local.end());
      ASSERT_TRUE(same_bytes(data.tensor, first.data()));
    });
  }
}

TEST_P(Collectives, WorkOnSplitGroups) {
  run([&](Communicator& comm) {
    const auto row = comm.split(comm.rank() / 2, comm.rank());
    const auto column = comm.split(comm.rank() % 2, comm.rank());
    for (int i = 0; i < 100; ++i) {
      float x = float(comm.rank() + i), y = 1;
      all_reduce(*row, Tensor(&x, DType::f32, {1}), ReduceOp::max);
      all_reduce(*column, Tensor(&y, DType::f32, {1}));
      EXPECT_EQ(x, float(std::min(comm.rank() / 2 * 2 + 1, comm.size() - 1) + i));
      EXPECT_EQ(y, float(column->size()));
    }
    comm.barrier();
  });
}

}  // namespace
}  // namespace tandem::test
