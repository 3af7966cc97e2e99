// Collective operands that share memory or are read-only.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "tandem/collectives.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"

namespace tandem::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class CollectiveMemory : public OnRanks {};

// An output of `bytes` in the middle of memory, and offsets for another operand of `other` bytes.
struct Buffers {
  Memory memory;
  std::byte* output;
  std::vector<std::byte*> refused, allowed;
  Buffers(size_t bytes, size_t other)
      : memory(bytes + 2 * other),
        output(memory.data() + other),
        allowed{output + bytes, output - other} {
    if (bytes && other) {
      refused = {output + bytes - 4, output + bytes - 1, output - other + 4, output - other + 1};
    }
  }
};

TEST_P(CollectiveMemory, OverlappingOutputsAreRefused) {
  run([](Communicator& comm) {
    const int world = comm.size();
    for (const int64_t rows :
         {int64_t(2 * world), int64_t(3 * world + 1), int64_t(20000 * world)}) {
      const Shard local = shard_of(rows, world, comm.rank());
      const size_t whole = size_t(rows) * 4, shard_bytes = size_t(local.count) * 4;
      const auto vector = [](std::byte* at, int64_t count) {
        return Tensor(at, DType::f32, {count});
      };
      const auto expect = [&](const Buffers& buffers, const char* op, const char* output,
                              const char* other, const auto& call) {
        SCOPED_TRACE(fmt::format("{} of {} rows on {}", op, rows, world));
        for (std::byte* at : buffers.refused) {
          EXPECT_THAT(
              error_of<InvalidArgument>([&] { call(at); }),
              AllOf(HasSubstr(fmt::format("{}: ", op)), HasSubstr(fmt::format("{} f32[", output)),
                    HasSubstr(fmt::format("{} f32[", other)),
                    HasSubstr(fmt::format(" at [{:#x}, ", reinterpret_cast<uintptr_t>(at))),
                    HasSubstr(
                        fmt::format(" at [{:#x}, ", reinterpret_cast<uintptr_t>(buffers.output)))));
        }
        for (std::byte* at : buffers.allowed) {
          EXPECT_EQ(error_of<InvalidArgument>([&] { call(at); }), "");
        }
      };
      const Buffers gather(whole, shard_bytes);
      expect(gather, "all_gather", "out", "shard", [&](std::byte* at) {
        all_gather(comm, vector(at, local.count), vector(gather.output, rows));
      });
      const Buffers scatter(shard_bytes, whole);
      expect(scatter, "reduce_scatter", "shard", "data", [&](std::byte* at) {
        reduce_scatter(comm, vector(at, rows), vector(scatter.output, local.count));
      });
      const std::vector<int64_t> counts(size_t(world), rows / world);
      const int64_t all = counts[0] * world;
      Buffers exchange(size_t(all) * 4, size_t(all) * 4);
      exchange.refused.push_back(exchange.output);
      expect(exchange, "all_to_all", "recv", "send", [&](std::byte* at) {
        all_to_all(comm, vector(at, all), counts, vector(exchange.output, all), counts);
      });
    }
  });
}

// An empty shard overlaps nothing, wherever its pointer points.
TEST_P(CollectiveMemory, EmptyShardsOverlapNothing) {
  if (ranks() == 1) GTEST_SKIP() << "a single rank holds every row";
  run([](Communicator& comm) {
    const int64_t local_rows = comm.rank() == 0 ? 1 : 0;
    std::vector<float> wide(8);
    const Tensor whole(wide.data(), DType::f32, {1, 8});
    const Tensor shard(local_rows ? wide.data() : wide.data() + 3, DType::f32, {local_rows, 8});
    all_gather(comm, shard, whole);
    reduce_scatter(comm, whole, shard);
  });
}

TEST_P(CollectiveMemory, ReadOnlyTensorsMayOnlyBeInputs) {
  run([](Communicator& comm) {
    const int world = comm.size(), rank = comm.rank();
    std::vector<float> memory(size_t(2 * world), 1);
    const std::vector<float> fixed(size_t(2 * world), 2);
    const Tensor data = Tensor::of(std::span(memory), {2 * world}),
                 constant = Tensor::of(std::span(fixed), {2 * world});
    const std::vector<int64_t> counts(size_t(world), 2);
    const auto refused = [&](const char* op, const char* name, int64_t count) {
      return fmt::format("{}: {} f32[{}] is read-only: expected memory to write to", op, name,
                         count);
    };
    EXPECT_EQ(error_of<InvalidArgument>([&] { all_reduce(comm, constant); }),
              refused("all_reduce", "data", 2 * world));
    EXPECT_EQ(error_of<InvalidArgument>([&] { all_gather(comm, data.rows(0, 2), constant); }),
              refused("all_gather", "out", 2 * world));
    EXPECT_EQ(error_of<InvalidArgument>([&] { reduce_scatter(comm, data, constant.rows(0, 2)); }),
              refused("reduce_scatter", "shard", 2));
    EXPECT_EQ(error_of<InvalidArgument>([&] { all_to_all(comm, data, counts, constant, counts); }),
              refused("all_to_all", "recv", 2 * world));
    if (world > 1) {
      EXPECT_EQ(error_of<InvalidArgument>([&] { recv(comm, constant, (rank + 1) % world); }),
                refused("recv", "data", 2 * world));
      EXPECT_EQ(error_of<InvalidArgument>([&] { broadcast(comm, constant, (rank + 1) % world); }),
                refused("broadcast", "data", 2 * world));
    }
    all_gather(comm, constant.rows(0, 2), data);
    reduce_scatter(comm, constant, data.rows(0, 2));
    all_to_all(comm, constant, counts, data, counts);
    broadcast(comm, rank == 0 ? constant : data, 0);
    if (world > 1 && rank == 0) send(comm, constant, 1);
    if (rank == 1) recv(comm, data, 0);
    EXPECT_EQ(memory, std::vector<float>(memory.size(), 2));
  });
}

// Negative counts, too large ones, and ones whose sum overflows, with and without a wire format.
TEST_P(CollectiveMemory, CountsThatDoNotFitAreRefused) {
  run([](Communicator& comm) {
    const int64_t world = comm.size(), max = std::numeric_limits<int64_t>::max();
    std::vector<float> memory(8), other(8);
    const Tensor from = Tensor::of(std::span(memory), {8}), to = Tensor::of(std::span(other), {8});
    const std::vector<int64_t> none(size_t(world), 0), negative(size_t(world), -1),
        overflowing(size_t(world), world == 1 ? max : max / world + 1);
    std::vector<int64_t> large(none);
    large.back() = 9;
    const Wire int8{.codec = Codec::int8, .group = 32};
    for (const Wire* wire : {static_cast<const Wire*>(nullptr), &int8}) {
      const auto refusal = [&](const std::vector<int64_t>& sends,
                               const std::vector<int64_t>& receives) {
        return error_of<InvalidArgument>([&] {
          wire ? all_to_all(comm, from, sends, to, receives, *wire)
               : all_to_all(comm, from, sends, to, receives);
        });
      };
      EXPECT_EQ(refusal(negative, none), "all_to_all: send count -1: expected at least 0");
      EXPECT_EQ(refusal(none, negative), "all_to_all: receive count -1: expected at least 0");
      for (const auto& counts : std::vector<std::vector<int64_t>>{large, overflowing, {}}) {
        EXPECT_THAT(refusal(counts, none), HasSubstr("counts that fit"));
        EXPECT_THAT(refusal(none, counts), HasSubstr("counts that fit"));
      }
    }
    comm.barrier();
  });
}

// Operands shared by ranks of one process: refused on all ranks before any is written, and the
// ranks stay in step.
TEST_P(CollectiveMemory, OutputsSharedByRanksAreRefusedByAll) {
  TANDEM_SKIP_UNDER_MPI("processes share no array");
  for (const int64_t rows : {12, 24000}) {
    std::vector<float> values(static_cast<size_t>(rows));
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.37F * float(i + 1);
    std::vector<float> shared = values;
    run([&](Communicator& comm) {
      if (comm.size() == 1) return;
      const Shard shard_rows = shard_of(rows, comm.size(), comm.rank());
      const Tensor all = Tensor::of(std::span(shared), {rows});
      std::vector<float> memory(static_cast<size_t>(rows)), shard_values(size_t(shard_rows.count));
      const Tensor local = Tensor::of(std::span(memory), {rows});
      const Tensor shard = Tensor::of(std::span(shard_values), {shard_rows.count});
      const Wire wire = Wire::parse("int8");
      const auto expect_refusal = [&](const char* operands, const auto& call) {
        EXPECT_THAT(
            error_of<InvalidArgument>(call),
            AllOf(HasSubstr(operands), HasSubstr("expected memory of its own for each rank")));
        EXPECT_EQ(shared, values) << operands;
      };
      expect_refusal("all_reduce: data of rank 0", [&] { all_reduce(comm, all); });
      expect_refusal("all_reduce: data of rank 0", [&] { all_reduce(comm, all, wire); });
      expect_refusal("all_reduce: residual of rank 0",
                     [&] { all_reduce(comm, local, wire, &all); });
      expect_refusal("all_gather: out of rank 0", [&] { all_gather(comm, shard, all); });
      expect_refusal("all_gather: out of rank 0", [&] { all_gather(comm, shard, all, wire); });
      expect_refusal("reduce_scatter: shard of rank 0", [&] {
        reduce_scatter(comm, all, all.rows(shard_rows.begin, shard_rows.count));
      });
      expect_refusal("broadcast: data of rank 0", [&] { broadcast(comm, all, 0); });
      // Operands that are only read may be one array.
      reduce_scatter(comm, all, shard);
      all_reduce(comm, local);
    });
  }
}

// A message that fits into the slots arrives whole wherever it is received; its sender may have
// freed its memory since. The end of a longer one would be overwritten before it is sent.
TEST_P(CollectiveMemory, MessagesOverTheirSourceArriveWholeOrAreRefused) {
  TANDEM_SKIP_UNDER_MPI("processes share no array");
  for (const int64_t rows : {1000, 100000, 4 << 20}) {
    std::vector<float> values(size_t(rows + rows / 2));
    for (size_t i = 0; i < values.size(); ++i) values[i] = float(i % 1013);
    std::vector<float> shared = values;
    run([&](Communicator& comm) {
      if (comm.size() == 1 || comm.rank() > 1) return;
      const std::span<float> all(shared);
      const auto from = all.first(size_t(rows)), to = all.last(size_t(rows));
      if (comm.rank() == 0) return send(comm, Tensor::of(from, {rows}), 1);
      const std::string refusal =
          error_of<InvalidArgument>([&] { recv(comm, Tensor::of(to, {rows}), 0); });
      if (rows > 100000) {
        EXPECT_THAT(refusal, HasSubstr("expected memory of its own for each rank"));
        EXPECT_EQ(shared, values);
      } else {
        EXPECT_EQ(refusal, "");
        EXPECT_TRUE(std::equal(to.begin(), to.end(), values.begin())) << rows;
        std::ranges::copy(values, shared.begin());
      }
    });
  }
}

TANDEM_INSTANTIATE(CollectiveMemory);

}  // namespace
}  // namespace tandem::test
