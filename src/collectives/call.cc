#include "collectives/call.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "comm/flow_spans.h"

namespace tandem::collectives {
namespace {

struct Header {
  uint64_t reduce_sent, gather_sent;  ///< chunks sent to the receiver before this call
  Args args;
  std::array<ByteRange, 3> ranges;
};
static_assert(sizeof(Header) <= kEnvelopeHeader);

}  // namespace

const char* name_of(Op op) {
  switch (op) {
    case Op::all_reduce:
      return "all_reduce";
    case Op::all_gather:
      return "all_gather";
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::all_to_all:
      return "all_to_all";
    case Op::broadcast:
      return "broadcast";
  }
  return "?";
}

Args::Args(Op op_, const Tensor& tensor)
    : op(op_), dtype(tensor.dtype()), dims(uint8_t(tensor.dims())) {
  for (int i = 0; i < tensor.dims(); ++i) shape[size_t(i)] = tensor.dim(i);
}

std::string Args::describe() const {
  const bool reduces = op == Op::all_reduce || op == Op::reduce_scatter;
  return fmt::format("{}{} {}[{}]{}{}{}", name_of(op),
                     !reduces                  ? ""
                     : reduce == ReduceOp::sum ? " sum"
                                               : " max",
                     tandem::name_of(dtype), fmt::join(shape.begin(), shape.begin() + dims, ", "),
                     root < 0 ? "" : fmt::format(" from root {}", root),
                     wire.is_none() ? "" : " as " + wire.describe(),
                     route == Route::given ? "" : " or uncompressed");
}

void require_contiguous(const char* op, const char* what, const Tensor& tensor) {
  if (!tensor.contiguous() || tensor.device().kind != DeviceKind::cpu) {
    throw InvalidArgument(fmt::format("{}: {} {}: expected a contiguous tensor in host memory", op,
                                      what, tensor.describe()));
  }
}

Call::Call(Communicator& comm, const Args& args, const Uses& uses)
    : comm_(comm),
      space_(comm.workspace()),
      layout_(space_.layout),
      args_(args),
      name_(name_of(args.op)),
      call_((space_.progress.require_even(), ++space_.calls)),
      errors_(std::uncaught_exceptions()),
      on_card_(comm, name_),
      names_{uses.written.name, uses.read.name, uses.residual.name},
      span_(SpanKind::wait, name_, -1, collective_call(comm)) {
  if (space_.reach == Reach::no_addresses) return;
  const std::array operands{&uses.written, &uses.read, &uses.residual};
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i]->tensor) ranges_[i] = byte_range(*operands[i]->tensor);
  }
}

Call::~Call() {
  if (std::uncaught_exceptions() > errors_ && !refused_) space_.progress.give_up(name_);
}

void Call::wait(int signal, uint64_t epoch, int peer) {
  space_.progress.waiting([&] { comm_.wait(*space_.buffer, signal, epoch, {name_, peer}); });
}

void Call::finish() {
  space_.progress.waiting([&] { comm_.flush(); });
}

void Call::find_left(int peer) {
  const Aborted error(peer, fmt::format("{}: it has left the call", name_));
  space_.progress.end(error);
  throw error;
}

void Call::settle() {
  finish();  // the first chunks may still be being sent from the caller's tensor
  refused_ = true;
}

void Call::refuse(const std::string& message) {
  settle();
  throw Mismatch(message);
}

void Call::require_apart(int rank, const std::array<ByteRange, 3>& local_data, int peer,
                         const std::array<ByteRange, 3>& remote) {
  constexpr size_t kRead = 1;
  for (size_t i = 0; i < local_data.size(); ++i) {
    for (size_t j = 0; j < remote.size(); ++j) {
      if ((i == kRead && j == kRead) || !local_data[i].overlaps(remote[j])) continue;
      settle();
      space_.progress.waiting([&] { require_all_stay(comm_, name_); });
      throw AgreedArgument(fmt::format(
          "{}: {} of rank {} at [{:#x}, {:#x}) overlaps {} of rank {} at [{:#x}, {:#x}): expected "
          "memory of its own for each rank",
          name_, names_[i].empty() ? "data" : names_[i], rank, local_data[i].begin,
          local_data[i].end, names_[j].empty() ? "data" : names_[j], peer, remote[j].begin,
          remote[j].end));
    }
  }
}

void Call::enter(int peer, std::span<const std::byte> payload, size_t arguments) {
  std::byte* out = space_.outgoing.get() +
                   layout_.envelope_bytes * ((call_ & 1) * size_t(size()) + size_t(peer));
  const Header header{space_.at(Stream::reduce, peer).sent, space_.at(Stream::gather, peer).sent,
                      args_, ranges_};
  std::memcpy(out, &header, sizeof header);
  if (!payload.empty()) std::memcpy(out + kEnvelopeHeader, payload.data(), payload.size());
  count_sent(payload.size() - arguments);
  comm_.put(peer, *space_.buffer, layout_.envelope_at(rank(), call_), out,
            kEnvelopeHeader + payload.size(), layout_.envelope(rank()), call_);
}

void Call::enter_all(std::span<const std::byte> payload, size_t arguments) {
  for (int step = 1; step < size(); ++step) enter(peer(step), payload, arguments);
}

const std::byte* Call::envelope(int source) const {
  return space_.buffer->local() + layout_.envelope_at(source, call_);
}

const std::byte* Call::payload(int source) const {
  return envelope(source) + kEnvelopeHeader;
}

void Call::check() {
  std::vector<Header> headers(static_cast<size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) {
      headers[size_t(r)].args = args_;
      headers[size_t(r)].ranges = ranges_;
      continue;
    }
    wait(layout_.envelope(r), call_, r);
    Header& header = headers[size_t(r)];
    std::memcpy(&header, envelope(r), sizeof header);
    for (const auto& [stream, sent] : {std::pair(Stream::reduce, header.reduce_sent),
                                       std::pair(Stream::gather, header.gather_sent)}) {
      uint64_t& received = space_.at(stream, r).received;
      if (received == sent) continue;
      received = sent;
      comm_.put(r, *space_.buffer, 0, nullptr, 0, layout_.freed(stream, rank()), sent);
    }
  }
  for (size_t r = 1; r < headers.size(); ++r) {
    if (headers[r].args == headers[0].args) continue;
    refuse(fmt::format("rank 0 calls {}, rank {} calls {}: expected the same on all ranks",
                       headers[0].args.describe(), r, headers[r].args.describe()));
  }
  if (space_.reach == Reach::no_addresses) return;
  for (size_t r = 1; r < headers.size(); ++r) {
    for (size_t other = 0; other < r; ++other) {
      require_apart(int(other), headers[other].ranges, int(r), headers[r].ranges);
    }
  }
}

void Call::await_slot(Stream stream, int peer) {
  const uint64_t sent = space_.at(stream, peer).sent;
  if (sent >= uint64_t(layout_.slots)) {
    wait(layout_.freed(stream, peer), sent + 1 - uint64_t(layout_.slots), peer);
  }
}

std::byte* Call::staging(Stream stream, int peer) {
  await_slot(stream, peer);
  return space_.staging(peer, space_.at(stream, peer).sent);
}

std::byte* Call::staging_for_all(uint64_t index) {
  for (int step = 1; step < size(); ++step) await_slot(Stream::gather, peer(step));
  return space_.staging(rank(), index);
}

void Call::send(Stream stream, int peer, const void* source, size_t bytes) {
  await_slot(stream, peer);
  uint64_t& sent = space_.at(stream, peer).sent;
  const size_t offset = layout_.slot_at(stream, rank(), sent);
  ++sent;
  space_.bytes_sent += bytes;
  comm_.put(peer, *space_.buffer, offset, source, bytes, layout_.arrived(stream, rank()), sent);
}

const std::byte* Call::receive(Stream stream, int source) {
  const uint64_t chunk = space_.at(stream, source).received;
  wait(layout_.arrived(stream, source), chunk + 1, source);
  return space_.buffer->local() + layout_.slot_at(stream, source, chunk);
}

void Call::release(Stream stream, int source) {
  const uint64_t read = ++space_.at(stream, source).received;
  comm_.put(source, *space_.buffer, 0, nullptr, 0, layout_.freed(stream, rank()), read);
}

uint64_t& Call::use_count(int rank) const {
  return *reinterpret_cast<uint64_t*>(space_.buffer->peer(rank) + layout_.use_count_at());
}

void Call::leave_all() {
  for (int step = 1; step < size(); ++step) {
    comm_.put(peer(step), *space_.buffer, 0, nullptr, 0, layout_.done(rank()), call_);
  }
  for (int step = 1; step < size(); ++step) {
    wait(layout_.done(peer(step)), call_, peer(step));
  }
}

size_t Call::chunk_bytes(size_t bytes) const {
  constexpr size_t kMin = 16 << 10;
  const size_t quarter = (bytes / 4 + 4095) / 4096 * 4096;
  return std::min(std::max(quarter, kMin), layout_.slot_bytes);
}

}  // namespace tandem::collectives
