#include "overlap/moe/cpu/dispatch_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/cpu/parallel.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {

using namespace schedule;

namespace {

constexpr size_t kFault = 512;  // max bytes of a message that describes a fault of a call

/// Process-wide number: distinguishes a layer from earlier, destroyed ones.
uint64_t next_layer() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

std::string describe_call(uint64_t batch) {
  return batch == 0 ? "forward" : fmt::format("backward of call {}", batch);
}

size_t padded(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/// Copies rows `numbers` of x, packed, to `to`.
void pack_rows(const Tensor& x, std::span<const int32_t> numbers, size_t row_bytes, std::byte* to) {
  const auto* const from = x.as<std::byte>();
  const size_t stride = size_t(x.stride(0)) * size_of(x.dtype());
  cpu::parallel_ranges(int64_t(numbers.size()), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(to + size_t(i) * row_bytes, from + size_t(numbers[size_t(i)]) * stride,
                  row_bytes);
    }
  });
}

}  // namespace

MoeDispatchGemmCpu::MoeDispatchGemmCpu(Communicator& comm, const MoeRankCoords& coords,
                                       const Wire& wire)
    : coords_(coords),
      is_exact_(wire.is_exact()),
      messages_(wire, coords.shape.dtype, coords.shape.hidden),
      layer_(next_layer()),
      routing_bytes_(padded(
          sizeof(Header) +
          std::max(kFault, size_t(coords.grid.ep) * sizeof(int64_t) +
                               size_t(coords.shape.tokens) * routed_bytes(coords.shape.top_k)))),
      source_bytes_(routing_bytes_ +
                    padded(std::max(size_t(coords.shape.tokens) * coords.row_bytes,
                                    messages_.max_bytes(coords.shape.tokens, kMaxMoeWaves)))),
      workspace_(comm, "moe_dispatch_gemm", size_t(coords.world) * source_bytes_,
                 size_t(coords.world) * source_bytes_,
                 coords.world * (1 + schedule::kMaxMoeWaves)) {}

size_t MoeDispatchGemmCpu::rows_offset(int source) const {
  return size_t(source) * source_bytes_ + routing_bytes_;
}

std::byte* MoeDispatchGemmCpu::message_of(int source) const {
  return (source == coords_.rank ? workspace_.scratch() : workspace_.shared()) +
         size_t(source) * source_bytes_;
}

void MoeDispatchGemmCpu::tell(int to, const Header& header, std::span<const std::byte> content) {
  std::byte* const begin = workspace_.scratch() + size_t(to) * source_bytes_;
  std::memcpy(begin, &header, sizeof header);
  std::ranges::copy(content, begin + sizeof header);
  if (to == coords_.rank) return;
  workspace_.put(to, size_t(coords_.rank) * source_bytes_, begin, sizeof header + content.size(),
                 routing_signal(coords_.rank));
}

void MoeDispatchGemmCpu::tell_all(const Header& header, std::span<const std::byte> content) {
  for (int step = 0; step < coords_.world; ++step) {
    tell(moe_target(coords_.rank, coords_.world, step), header, content);
  }
}

/// Sends this rank's loads, then its routing.
void MoeDispatchGemmCpu::send_routing(const OverlapOptions& plan, const MoeRouting& routing,
                                      const MoeRows& rows) {
  const auto k = size_t(coords_.shape.top_k);
  for (int step = 0; step < coords_.world; ++step) {
    const int to = moe_target(coords_.rank, coords_.world, step);
    const std::span<const int32_t> sent = rows.sent(to);
    const auto loads = std::as_bytes(rows.loads());
    entries_.resize(loads.size() + sent.size() * routed_bytes(coords_.shape.top_k));
    std::byte* at = std::ranges::copy(loads, entries_.data()).out;
    for (const int32_t row : sent) {
      std::memcpy(at, routing.experts.as<int32_t>() + size_t(row) * k, k * sizeof(int32_t));
      at += k * sizeof(int32_t);
      std::memcpy(at, routing.weights.as<float>() + size_t(row) * k, k * sizeof(float));
      at += k * sizeof(float);
    }
    tell(to, {.rows = int64_t(sent.size()), .waves = plan.chunks}, entries_);
  }
}

void MoeDispatchGemmCpu::refuse(std::string_view fault) {
  workspace_.begin();
  fault = fault.substr(0, kFault);
  tell_all({.fault_bytes = fault.size()}, std::as_bytes(std::span(fault)));
  await_headers();
}

MoeDispatchGemmCpu::Header MoeDispatchGemmCpu::header_of(int source) const {
  Header header;
  std::memcpy(&header, message_of(source), sizeof header);
  return header;
}

void MoeDispatchGemmCpu::await_headers() {
  for (int step = 1; step < coords_.world; ++step) {
    const int source = moe_source(coords_.rank, coords_.world, step);
    workspace_.await(routing_signal(source), source, 0);
  }
  for (int source = 0; source < coords_.world; ++source) {
    const Header header = header_of(source), first = header_of(0);
    std::string fault;
    if (header.fault_bytes > 0) {
      const std::byte* const text = message_of(source) + sizeof header;
      fault.assign(reinterpret_cast<const char*>(text), header.fault_bytes);
    } else if (header.batch != first.batch) {
      fault = fmt::format("{}: expected {} as on rank 0", describe_call(header.batch),
                          describe_call(first.batch));
    } else {
      continue;
    }
    workspace_.flush();
    throw Mismatch(fmt::format("moe: rank {}: {}", source, fault));
  }
}

std::string MoeDispatchGemmCpu::fault_of(const MoeRows& rows) const {
  if (rows.filled.layer == 0) return "the batch is not filled: expected that of a forward pass";
  if (rows.filled.layer == layer_) return "";
  return "the batch is another layer's: expected one that this layer has filled";
}

int MoeDispatchGemmCpu::level_of(std::span<const int64_t> loads) const {
  return moe_level(coords_.grid, coords_.shape.top_k, moe_imbalance(loads.data(), coords_.grid.ep));
}

void MoeDispatchGemmCpu::list_arrived(MoeRows& rows) {
  std::vector<RoutedRows> sources(static_cast<size_t>(coords_.world));
  std::vector<int64_t> loads(static_cast<size_t>(coords_.grid.ep));
  for (int source = 0; source < coords_.world; ++source) {
    const std::byte* at = message_of(source) + sizeof(Header);
    for (int64_t& load : loads) {
      int64_t of_source;
      std::memcpy(&of_source, at, sizeof of_source);
      load += of_source;
      at += sizeof of_source;
    }
    sources[size_t(source)] = {header_of(source).rows, at};
  }
  rows.level = level_of(loads);
  rows.list_arrived(coords_, sources);
}

size_t MoeDispatchGemmCpu::messages_before(int waves, int64_t rows, int wave) const {
  return bytes_before(messages_, wave, [&](int i) { return moe_wave(rows, waves, i).count; });
}

void MoeDispatchGemmCpu::send_rows(const OverlapOptions& plan, const Tensor& x,
                                   const MoeRows& rows) {
  for (int wave = 0; wave < plan.chunks; ++wave) {
    for (int step = 1; step < coords_.world; ++step) {
      send_wave(plan, x, rows, moe_target(coords_.rank, coords_.world, step), wave);
    }
  }
}

void MoeDispatchGemmCpu::send_wave(const OverlapOptions& plan, const Tensor& x, const MoeRows& rows,
                                   int to, int wave) {
  const auto count = int64_t(rows.sent(to).size());
  const Range wave_range = moe_wave(count, plan.chunks, wave);
  const std::span<const int32_t> sent =
      rows.sent(to).subspan(size_t(wave_range.begin), size_t(wave_range.count));
  std::byte* const area = workspace_.scratch() + rows_offset(to);
  size_t at = size_t(wave_range.begin) * coords_.row_bytes,
         bytes = size_t(wave_range.count) * coords_.row_bytes;
  {
    const ScopedSpan span(SpanKind::compute, "moe_pack", wave, to);
    if (plan.wire.is_none()) {
      pack_rows(x, sent, coords_.row_bytes, area + at);
    } else {
      const Tensor packed = packed_.of(coords_.shape.dtype, wave_range.count, coords_.shape.hidden);
      pack_rows(x, sent, coords_.row_bytes, packed.as<std::byte>());
      at = messages_before(plan.chunks, count, wave);
      bytes = messages_.encode(packed, area + at);
    }
  }
  workspace_.put(to, rows_offset(coords_.rank) + at, area + at, bytes,
                 wave_signal(coords_.rank, wave));
}

void MoeDispatchGemmCpu::copy_row(const std::byte* from, int source, int64_t row,
                                  const MoeRows& rows, const Arrived& to) const {
  if (to.distinct.dims() > 0) {
    const auto at = size_t(rows.first_received(source) + row);
    std::memcpy(to.distinct.as<std::byte>() + at * coords_.row_bytes, from, coords_.row_bytes);
  }
  copy_to_slots(from, coords_.row_bytes, rows.uses(source, row), to.sorted.as<std::byte>());
}

void MoeDispatchGemmCpu::gather_local(const OverlapOptions& plan, const Tensor& x,
                                      const MoeRows& rows, const Arrived& to) {
  const ScopedSpan span(SpanKind::compute, "moe_permute");
  const std::span<const int32_t> sent = rows.sent(coords_.rank);
  const auto count = int64_t(sent.size());
  const bool decoded = coords_.world > 1 && !plan.wire.is_none() && !is_exact_;
  if (decoded) {
    const Tensor local = packed_.of(coords_.shape.dtype, count, coords_.shape.hidden);
    std::byte* const messages = workspace_.scratch() + rows_offset(coords_.rank);
    pack_rows(x, sent, coords_.row_bytes, local.as<std::byte>());
    messages_.encode(local, messages);
    messages_.decode(messages, count, local.as<std::byte>());
  }
  const auto* const from =
      decoded ? packed_.view(coords_.shape.dtype, count, coords_.shape.hidden).as<std::byte>()
              : x.as<std::byte>();
  const size_t stride = decoded ? coords_.row_bytes : size_t(x.stride(0)) * size_of(x.dtype());
  cpu::parallel_ranges(count, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const size_t at = decoded ? size_t(row) : size_t(sent[size_t(row)]);
      copy_row(from + at * stride, coords_.rank, row, rows, to);
    }
  });
}

void MoeDispatchGemmCpu::gather_wave(const OverlapOptions& plan, int source, int wave,
                                     const MoeRows& rows, const Arrived& to) {
  workspace_.await(wave_signal(source, wave), source, wave);
  const ScopedSpan span(SpanKind::compute, "moe_permute", wave, source);
  const int64_t arrived = rows.arrived(source);
  const auto waves = int(header_of(source).waves);
  const Range wave_range = moe_wave(arrived, waves, wave);
  const std::byte* const area = workspace_.shared() + rows_offset(source);
  const std::byte* from = area + size_t(wave_range.begin) * coords_.row_bytes;
  if (!plan.wire.is_none()) {
    const Tensor wave_rows =
        packed_.of(coords_.shape.dtype, wave_range.count, coords_.shape.hidden);
    messages_.decode(area + messages_before(waves, arrived, wave), wave_range.count,
                     wave_rows.as<std::byte>());
    from = wave_rows.as<std::byte>();
  }
  cpu::parallel_ranges(wave_range.count, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      copy_row(from + size_t(row) * coords_.row_bytes, source, wave_range.begin + row, rows, to);
    }
  });
}

void MoeDispatchGemmCpu::gather_chunk(const OverlapOptions& plan, int chunk, const MoeRows& rows,
                                      const Arrived& to) {
  const Range waves = moe_waves_of_chunk(plan.chunks, chunk);
  for (int64_t wave = waves.begin; wave < waves.end(); ++wave) {
    for (int step = 1; step < coords_.world; ++step) {
      const int source = moe_source(coords_.rank, coords_.world, step);
      if (wave < header_of(source).waves) gather_wave(plan, source, int(wave), rows, to);
    }
  }
}

void MoeDispatchGemmCpu::notify(std::span<const OverlapOptions> plans, const MoeRouting& routing,
                                MoeRows& rows) {
  if (const std::string fault = MoeRows::fault_of(coords_, routing); !fault.empty()) {
    return refuse(fault);
  }
  workspace_.begin();
  rows.list_sent(coords_, routing);
  rows.level = level_of(rows.loads());
  send_routing(plans[size_t(rows.level)], routing, rows);
}

void MoeDispatchGemmCpu::notify_again(const OverlapOptions& plan, const MoeRows& rows) {
  workspace_.begin();
  tell_all({.batch = rows.filled.call, .waves = plan.chunks}, {});
}

void MoeDispatchGemmCpu::permute(MoeRows& rows) {
  await_headers();
  list_arrived(rows);
}

void MoeDispatchGemmCpu::await_ranks() {
  await_headers();
}

}  // namespace tandem
