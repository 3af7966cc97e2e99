// Every rank sends its row counts to all in its envelope, so every rank can check every pair; rows
// that fit are sent in the envelope, too.
#include <cstring>
#include <vector>

#include "collectives/call.h"
#include "collectives/chunks.h"
#include "collectives/gpu.h"
#include "collectives/rows/counts.h"
#include "collectives/rows/rows.h"

namespace tandem {

using namespace collectives;

namespace {

Span chunk_of(const Call& call, const Span& whole, int64_t step) {
  if (step < 0 || whole.bytes == 0) return {0, 0};
  const Slice slice = slice_of(int64_t(whole.bytes), int64_t(call.chunk_bytes(whole.bytes)), step);
  return {whole.begin + size_t(slice.begin), size_t(slice.count)};
}

int64_t steps_of(const Call& call, const std::vector<Span>& spans, size_t small) {
  int64_t steps = 0;
  for (int r = 0; r < call.size(); ++r) {
    const size_t bytes = spans[size_t(r)].bytes;
    if (r == call.rank() || bytes <= small) continue;
    steps = std::max(steps, slices_in(int64_t(bytes), int64_t(call.chunk_bytes(bytes))));
  }
  return steps;
}

}  // namespace

void all_to_all(Communicator& comm, const Tensor& send, Counts send_counts, const Tensor& recv,
                Counts recv_counts) {
  require_same_rows("all_to_all", send, recv);
  require_counts(comm, "send", send, send_counts);
  require_counts(comm, "receive", recv, recv_counts);
  require_apart("all_to_all", {{"recv", &recv}}, {{"send", &send}});
  if (gpu::is_gpu(comm)) return gpu::all_to_all(comm, send, send_counts, recv, recv_counts);
  require_contiguous("all_to_all", "send", send);
  require_contiguous("all_to_all", "recv", recv);

  Args args(Op::all_to_all, send);
  args.shape[0] = 0;  // the counts carry the number of rows
  Call call(comm, args, {.written = {"recv", &recv}, .read = {"send", &send}});
  const int world = call.size(), me = call.rank();
  CountTable table(world);
  std::vector<int64_t> both(send_counts.begin(), send_counts.end());
  both.insert(both.end(), recv_counts.begin(), recv_counts.end());
  table.set(me, std::as_bytes(std::span(both)).data());

  const auto outgoing = ranges_of<Span>(send_counts, row_bytes(send));
  const auto incoming = ranges_of<Span>(recv_counts, row_bytes(recv));
  const auto* from = send.as<const std::byte>();
  auto* to = recv.as<std::byte>();
  const size_t small = call.small() - table.bytes();

  std::vector<std::byte> payload(call.small());
  std::memcpy(payload.data(), both.data(), table.bytes());
  for (int step = 1; step < world; ++step) {
    const Span rows = outgoing[size_t(call.peer(step))];
    const size_t bytes = rows.bytes <= small ? rows.bytes : 0;
    if (bytes) std::memcpy(payload.data() + table.bytes(), from + rows.begin, bytes);
    call.enter(call.peer(step), {payload.data(), table.bytes() + bytes}, table.bytes());
  }

  const int64_t sends = steps_of(call, outgoing, small), receives = steps_of(call, incoming, small);
  for (int64_t t = 0; t < std::max<int64_t>(1, std::max(sends, receives + 1)); ++t) {
    for (int step = 1; step < world; ++step) {
      const int peer = call.peer(step);
      const Span rows = outgoing[size_t(peer)];
      const Span chunk = rows.bytes <= small ? Span{0, 0} : chunk_of(call, rows, t);
      if (chunk.bytes) call.send(Stream::reduce, peer, from + chunk.begin, chunk.bytes);
    }
    if (t == 0) {
      call.check();
      for (int r = 0; r < world; ++r) {
        if (r != me) table.set(r, call.payload(r));
      }
      table.check(call);
      const Span local = outgoing[size_t(me)];
      if (local.bytes)
        std::memmove(to + incoming[size_t(me)].begin, from + local.begin, local.bytes);
      for (int r = 0; r < world; ++r) {
        const Span rows = incoming[size_t(r)];
        if (r == me || rows.bytes == 0 || rows.bytes > small) continue;
        std::memcpy(to + rows.begin, call.payload(r) + table.bytes(), rows.bytes);
      }
    }
    for (int step = 1; step < world; ++step) {
      const int source = call.peer(world - step);
      const Span rows = incoming[size_t(source)];
      const Span chunk = rows.bytes <= small ? Span{0, 0} : chunk_of(call, rows, t - 1);
      if (chunk.bytes) receive_into(call, Stream::reduce, source, to + chunk.begin, chunk.bytes);
    }
  }
  call.finish();
}

}  // namespace tandem
