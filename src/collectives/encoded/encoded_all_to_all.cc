// The rows of each pair are separate messages, cut by their own size; local rows are copied.
#include <algorithm>
#include <cstring>

#include "collectives/call.h"
#include "collectives/encoded/encoded.h"
#include "collectives/gpu.h"
#include "collectives/rows/counts.h"
#include "collectives/rows/rows.h"

namespace tandem {

using namespace collectives;

namespace {

class EncodedAllToAll {
 public:
  EncodedAllToAll(Call& call, const Wire& wire, const Tensor& send, Counts send_counts,
                  const Tensor& recv, Counts recv_counts)
      : call_(call),
        element_(size_of(send.dtype())),
        from_(send.as<const std::byte>()),
        to_(recv.as<std::byte>()),
        outgoing_(ranges_of<Elements>(send_counts, row_of(send))),
        incoming_(ranges_of<Elements>(recv_counts, row_of(recv))),
        encoded_(call, wire, send.dtype(), 0) {}

  void run(const CountTable& local_counts, std::span<const std::byte> both) {
    call_.enter_all(both, both.size());
    int64_t steps = 0;
    for (int step = 1; step < call_.size(); ++step) {
      const auto peer = size_t(call_.peer(step));
      steps = std::max({steps, encoded_.steps_of(outgoing_[peer].count),
                        encoded_.steps_of(incoming_[peer].count)});
    }
    for (int64_t t = 0; t < steps + 1; ++t) {
      send(t);
      if (t == 0) check(local_counts);
      receive(t - 1);
    }
    call_.finish();
  }

 private:
  static int64_t row_of(const Tensor& rows) {
    return rows.dim(0) ? rows.elements() / rows.dim(0) : 0;
  }

  void send(int64_t t) {
    for (int step = 1; step < call_.size(); ++step) {
      const int peer = call_.peer(step);
      const Elements chunk = encoded_.chunk(outgoing_[size_t(peer)], t);
      if (!chunk.count) continue;
      encoded_.send(Stream::reduce, peer, from_ + size_t(chunk.begin) * element_, chunk.count,
                    nullptr);
    }
  }

  void check(CountTable counts) {
    call_.check();
    for (int r = 0; r < call_.size(); ++r) {
      if (r != call_.rank()) counts.set(r, call_.payload(r));
    }
    counts.check(call_);
    const Elements local = outgoing_[size_t(call_.rank())];
    if (!local.count) return;
    std::memmove(to_ + size_t(incoming_[size_t(call_.rank())].begin) * element_,
                 from_ + size_t(local.begin) * element_, size_t(local.count) * element_);
  }

  void receive(int64_t t) {
    for (int step = 1; step < call_.size(); ++step) {
      const int source = call_.peer(call_.size() - step);
      const Elements chunk = encoded_.chunk(incoming_[size_t(source)], t);
      if (!chunk.count) continue;
      encoded_.receive(Stream::reduce, source, to_ + size_t(chunk.begin) * element_, chunk.count);
    }
  }

  Call& call_;
  const size_t element_;
  const std::byte* const from_;
  std::byte* const to_;
  const std::vector<Elements> outgoing_, incoming_;
  Encoded encoded_;
};

}  // namespace

void all_to_all(Communicator& comm, const Tensor& send, Counts send_counts, const Tensor& recv,
                Counts recv_counts, const Wire& wire) {
  if (wire.is_none() || comm.size() == 1) {
    return all_to_all(comm, send, send_counts, recv, recv_counts);
  }
  require_same_rows("all_to_all", send, recv);
  require_counts(comm, "send", send, send_counts);
  require_counts(comm, "receive", recv, recv_counts);
  require_apart("all_to_all", {{"recv", &recv}}, {{"send", &send}});
  if (gpu::is_gpu(comm)) return gpu::all_to_all(comm, send, send_counts, recv, recv_counts, wire);
  require_encoded("all_to_all", comm, wire, send);
  require_contiguous("all_to_all", "send", send);
  require_contiguous("all_to_all", "recv", recv);
  Args args(Op::all_to_all, send);
  args.shape[0] = 0;  // the counts carry the number of rows
  args.wire = wire;
  Call call(comm, args, {.written = {"recv", &recv}, .read = {"send", &send}});
  std::vector<int64_t> both(send_counts.begin(), send_counts.end());
  both.insert(both.end(), recv_counts.begin(), recv_counts.end());
  const auto bytes = std::as_bytes(std::span(both));
  CountTable counts(comm.size());
  counts.set(comm.rank(), bytes.data());
  EncodedAllToAll(call, wire, send, send_counts, recv, recv_counts).run(counts, bytes);
}

}  // namespace tandem
