// Bytes that collectives count as sent: those of the data, however they travel.
#include <numeric>
#include <vector>

#include "tandem/collectives.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

class SentBytes : public OnRanks {
 protected:
  /// Bytes that all ranks together have sent in `call`.
  static uint64_t sent_in(Communicator& comm, const std::function<void()>& call) {
    const uint64_t before = comm.bytes_sent();
    call();
    const uint64_t sent = comm.bytes_sent() - before;
    uint64_t sum = 0;
    for (const auto& blob : comm.exchange(std::as_bytes(std::span(&sent, 1)), "sent")) {
      uint64_t of_rank = 0;
      std::memcpy(&of_rank, blob.data(), sizeof of_rank);
      sum += of_rank;
    }
    return sum;
  }
};
TANDEM_INSTANTIATE(SentBytes);

TEST_P(SentBytes, AreThoseOfTheDataInEveryForm) {
  run([&](Communicator& comm) {
    const auto peers = uint64_t(comm.size() - 1);
    for (const int64_t rows : {int64_t(0), int64_t(5), int64_t(257), int64_t(100'003)}) {
      std::vector<float> whole(size_t(rows), 1.0f);
      const Tensor data = Tensor::of(std::span(whole), {rows});
      const Shard local = shard_of(rows, comm.size(), comm.rank());
      std::vector<float> local_sum(size_t(local.count));
      const Tensor shard = Tensor::of(std::span(local_sum), {local.count});
      EXPECT_EQ(sent_in(comm, [&] { all_gather(comm, shard, data); }), peers * data.bytes());
      EXPECT_EQ(sent_in(comm, [&] { reduce_scatter(comm, data, shard); }), peers * data.bytes());
      EXPECT_EQ(sent_in(comm, [&] { broadcast(comm, data, 0); }), peers * data.bytes());
      // Small sums are sent whole, others as shards and their sums.
      const uint64_t sent = sent_in(comm, [&] { all_reduce(comm, data); });
      const bool is_small = data.bytes() <= 4096;
      EXPECT_EQ(sent, peers * data.bytes() * (is_small ? uint64_t(comm.size()) : 2)) << rows;
    }
  });
}

TEST_P(SentBytes, OfMessagesToo) {
  if (ranks() == 1) GTEST_SKIP() << "needs two ranks";
  run([&](Communicator& comm) {
    for (const int64_t elements : {int64_t(0), int64_t(7), int64_t(300'000)}) {
      std::vector<float> values(size_t(elements), 1.0f);
      const Tensor data = Tensor::of(std::span(values), {elements});
      EXPECT_EQ(sent_in(comm,
                        [&] {
                          if (comm.rank() == 0) send(comm, data, 1);
                          if (comm.rank() == 1) recv(comm, data, 0);
                        }),
                data.bytes());
    }
  });
}

TEST_P(SentBytes, LeaveOutRowsThatStayAndCounts) {
  run([&](Communicator& comm) {
    for (const int64_t rows : {int64_t(1), int64_t(9), int64_t(30'001)}) {
      const std::vector<int64_t> counts(size_t(comm.size()), rows);
      std::vector<float> in(size_t(rows * comm.size())), out(in.size());
      const Tensor send = Tensor::of(std::span(in), {rows * comm.size()});
      const Tensor recv = Tensor::of(std::span(out), {rows * comm.size()});
      EXPECT_EQ(sent_in(comm, [&] { all_to_all(comm, send, counts, recv, counts); }),
                uint64_t(comm.size()) * uint64_t(comm.size() - 1) * uint64_t(rows) * sizeof(float));
      const Wire wire = Wire::parse("int8");
      EXPECT_EQ(sent_in(comm, [&] { all_to_all(comm, send, counts, recv, counts, wire); }),
                uint64_t(comm.size()) * uint64_t(comm.size() - 1) * wire.bytes(rows, DType::f32));
    }
  });
}

}  // namespace
}  // namespace tandem::test
