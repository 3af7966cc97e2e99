#include <cstring>

#include "collectives/call.h"
#include "collectives/encoded/encoded.h"
#include "collectives/gpu.h"
#include "collectives/rows/routes.h"
#include "collectives/rows/rows.h"

namespace tandem {

using namespace collectives;

namespace {

class EncodedAllGather {
 public:
  EncodedAllGather(Call& call, const Wire& wire, const Tensor& shard, const Tensor& out)
      : call_(call),
        rows_(out.dim(0)),
        row_(rows_ ? out.elements() / rows_ : 0),
        element_(size_of(out.dtype())),
        shard_(shard.as<const std::byte>()),
        out_(out.as<std::byte>()),
        encoded_(call, wire, out.dtype(), elements_of(0).count) {}

  /// Runs with a message that fits in the envelope.
  void run_at_once(size_t bytes) {
    std::vector<std::byte> message(bytes);
    const Elements local_shard = elements_of(call_.rank());
    const size_t used = encoded_.encode(shard_, local_shard.count, nullptr, message.data());
    call_.enter_all({message.data(), used});
    call_.check();
    for (int r = 0; r < call_.size(); ++r) {
      const std::byte* from = r == call_.rank() ? message.data() : call_.payload(r);
      encoded_.decode(from, elements_of(r).count, at(elements_of(r)));
    }
  }

  void run() {
    call_.enter_all({});
    for (int64_t t = 0; t < encoded_.steps() + 1; ++t) {
      const std::byte* sent = send_local(t);
      if (t == 0) call_.check();
      const Elements local = encoded_.chunk(elements_of(call_.rank()), t);
      if (local.count) encoded_.decode(sent, local.count, at(local));
      for (int step = 1; step < call_.size(); ++step) {
        const int source = call_.peer(call_.size() - step);
        const Elements chunk = encoded_.chunk(elements_of(source), t - 1);
        if (chunk.count) encoded_.receive(Stream::gather, source, at(chunk), chunk.count);
      }
    }
    call_.finish();
  }

 private:
  Elements elements_of(int rank) const {
    const Shard rows = shard_of(rows_, call_.size(), rank);
    return {rows.begin * row_, rows.count * row_};
  }
  std::byte* at(const Elements& chunk) const { return out_ + size_t(chunk.begin) * element_; }

  /// Returns the message, null past the end.
  const std::byte* send_local(int64_t t) {
    const Elements local_shard = elements_of(call_.rank()), chunk = encoded_.chunk(local_shard, t);
    if (!chunk.count) return nullptr;
    const std::byte* values = shard_ + size_t(chunk.begin - local_shard.begin) * element_;
    std::byte* message = call_.staging_for_all(uint64_t(t));
    const size_t bytes = encoded_.encode(values, chunk.count, nullptr, message);
    for (int step = 1; step < call_.size(); ++step) {
      call_.send(Stream::gather, call_.peer(step), message, bytes);
    }
    return message;
  }

  Call& call_;
  const int64_t rows_, row_;
  const size_t element_;
  const std::byte* const shard_;
  std::byte* const out_;
  Encoded encoded_;
};

}  // namespace

void collectives::check_all_gather(const Communicator& comm, const Tensor& shard, const Tensor& out,
                                   const Wire& wire) {
  require_writable("all_gather", {"out", &out});
  require_encoded("all_gather", comm, wire, out);
  require_contiguous("all_gather", "shard", shard);
  require_contiguous("all_gather", "out", out);
  require_shard("all_gather", comm, shard, out);
  require_shard_position("all_gather", comm, shard, {"out", &out});
}

void collectives::run_all_gather(Communicator& comm, const Tensor& shard, const Tensor& out,
                                 const Wire& wire, Route route) {
  if (route == Route::uncompressed) return uncompressed_all_gather(comm, shard, out, {wire, route});
  Args args(Op::all_gather, out);
  args.wire = wire;
  args.route = route;
  Call call(comm, args, {.written = {"out", &out}, .read = {"shard", &shard}});
  EncodedAllGather all(call, wire, shard, out);
  const int64_t rows = out.dim(0), row = rows ? out.elements() / rows : 0;
  const size_t bytes = wire.bytes(shard_of(rows, comm.size(), 0).count * row, out.dtype());
  bytes <= call.small() ? all.run_at_once(bytes) : all.run();
}

void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out, const Wire& wire) {
  if (wire.is_none() || comm.size() == 1) return all_gather(comm, shard, out);
  if (gpu::is_gpu(comm)) {
    require_writable("all_gather", {"out", &out});
    return gpu::all_gather(comm, shard, out, wire);
  }
  check_all_gather(comm, shard, out, wire);
  run_all_gather(comm, shard, out, wire, Route::given);
}

}  // namespace tandem
