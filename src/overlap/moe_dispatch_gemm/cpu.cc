#include "overlap/moe_dispatch_gemm/cpu.h"

#include <fmt/format.h>

#include <array>
#include <cstring>

#include "core/cpu/parallel.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {

using namespace schedule;

namespace {

constexpr size_t kFault = 256;  // bytes of a message that says what is wrong with a routing

/// Before the entries of what one rank routes.
struct RoutingHeader {
  int64_t rows = 0;
  std::array<char, kFault> fault{};
};

size_t padded(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/// Rows `numbers` of x, one after the other.
void pack_rows(const Tensor& x, std::span<const int32_t> numbers, size_t line, std::byte* to) {
  const auto* const from = x.as<std::byte>();
  const size_t stride = size_t(x.stride(0)) * size_of(x.dtype());
  cpu::parallel_ranges(int64_t(numbers.size()), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(to + size_t(i) * line, from + size_t(numbers[size_t(i)]) * stride, line);
    }
  });
}

}  // namespace

MoeDispatchGemmCpu::MoeDispatchGemmCpu(Communicator& comm, const MoePlace& place, const Wire& wire)
    : place_(place),
      is_exact_(wire.is_exact()),
      messages_(wire, place.shape.dtype, place.shape.hidden),
      routing_bytes_(padded(sizeof(RoutingHeader) +
                            size_t(place.shape.tokens) * routed_bytes(place.shape.top_k))),
      source_bytes_(routing_bytes_ +
                    padded(std::max(size_t(place.shape.tokens) * place.line,
                                    messages_.most_bytes(place.shape.tokens, kMoePieces)))),
      workspace_(comm, "moe_dispatch_gemm", size_t(place.world) * source_bytes_,
                 size_t(place.world) * source_bytes_, place.world * (1 + schedule::kMoePieces)) {}

size_t MoeDispatchGemmCpu::rows_offset(int source) const {
  return size_t(source) * source_bytes_ + routing_bytes_;
}

void MoeDispatchGemmCpu::send_routing(const MoeRouting& routing, const MoeRows& rows,
                                      const std::string& fault) {
  const auto k = size_t(place_.shape.top_k);
  for (int step = 0; step < place_.world; ++step) {
    const int to = moe_target(place_.rank, place_.world, step);
    std::byte* const begin = workspace_.scratch() + size_t(to) * source_bytes_;
    RoutingHeader header;
    std::span<const int32_t> sent;
    if (fault.empty()) sent = rows.sent(to);
    header.rows = int64_t(sent.size());
    fault.copy(header.fault.data(), kFault - 1);
    std::memcpy(begin, &header, sizeof header);
    std::byte* at = begin + sizeof header;
    for (const int32_t row : sent) {
      std::memcpy(at, routing.experts.as<int32_t>() + size_t(row) * k, k * sizeof(int32_t));
      at += k * sizeof(int32_t);
      std::memcpy(at, routing.weights.as<float>() + size_t(row) * k, k * sizeof(float));
      at += k * sizeof(float);
    }
    if (step == 0) continue;
    workspace_.put(to, size_t(place_.rank) * source_bytes_, begin, size_t(at - begin),
                   routing_signal(place_.rank));
  }
}

void MoeDispatchGemmCpu::receive_routing(MoeRows& rows, const std::string& own_fault) {
  std::vector<RoutedRows> sources(size_t(place_.world));
  std::string fault = own_fault.empty() ? "" : fmt::format("rank {}: {}", place_.rank, own_fault);
  int faulty = own_fault.empty() ? place_.world : place_.rank;
  for (int step = 0; step < place_.world; ++step) {
    const int source = moe_source(place_.rank, place_.world, step);
    if (step > 0) workspace_.await(routing_signal(source), source, 0);
    const std::byte* const begin =
        (step == 0 ? workspace_.scratch() : workspace_.shared()) + size_t(source) * source_bytes_;
    RoutingHeader header;
    std::memcpy(&header, begin, sizeof header);
    sources[size_t(source)] = {header.rows, begin + sizeof header};
    if (header.fault[0] == 0 || source >= faulty) continue;
    faulty = source;
    fault = fmt::format("rank {}: {}", source, header.fault.data());
  }
  if (!fault.empty()) {
    workspace_.flush();
    throw Mismatch("moe: " + fault);
  }
  rows.list_arrived(place_, sources);
}

size_t MoeDispatchGemmCpu::messages_before(const MoePlan& plan, int64_t rows, int wave) const {
  return bytes_before(messages_, wave, [&](int i) { return moe_wave(rows, plan.chunks, i).count; });
}

void MoeDispatchGemmCpu::send_rows(const MoePlan& plan, const Tensor& x, const MoeRows& rows) {
  for (int wave = 0; wave < plan.chunks; ++wave) {
    for (int step = 1; step < place_.world; ++step) {
      send_wave(plan, x, rows, moe_target(place_.rank, place_.world, step), wave);
    }
  }
}

void MoeDispatchGemmCpu::send_wave(const MoePlan& plan, const Tensor& x, const MoeRows& rows,
                                   int to, int wave) {
  const auto count = int64_t(rows.sent(to).size());
  const Range part = moe_wave(count, plan.chunks, wave);
  const std::span<const int32_t> sent =
      rows.sent(to).subspan(size_t(part.begin), size_t(part.count));
  std::byte* const area = workspace_.scratch() + rows_offset(to);
  size_t at = size_t(part.begin) * place_.line, bytes = size_t(part.count) * place_.line;
  {
    const ScopedSpan span(SpanKind::compute, "moe_pack", wave, to);
    if (plan.wire.is_none()) {
      pack_rows(x, sent, place_.line, area + at);
    } else {
      const Tensor packed = packed_.of(place_.shape.dtype, part.count, place_.shape.hidden);
      pack_rows(x, sent, place_.line, packed.as<std::byte>());
      at = messages_before(plan, count, wave);
      bytes = messages_.encode(packed, area + at);
    }
  }
  workspace_.put(to, rows_offset(place_.rank) + at, area + at, bytes,
                 wave_signal(place_.rank, wave));
}

void MoeDispatchGemmCpu::place_own(const MoePlan& plan, const Tensor& x, const MoeRows& rows,
                                   const Tensor& placed) {
  const ScopedSpan span(SpanKind::compute, "moe_place");
  const std::span<const int32_t> sent = rows.sent(place_.rank);
  const auto count = int64_t(sent.size());
  const bool decoded = place_.world > 1 && !plan.wire.is_none() && !is_exact_;
  if (decoded) {
    const Tensor own = packed_.of(place_.shape.dtype, count, place_.shape.hidden);
    std::byte* const messages = workspace_.scratch() + rows_offset(place_.rank);
    pack_rows(x, sent, place_.line, own.as<std::byte>());
    messages_.encode(own, messages);
    messages_.decode(messages, count, own.as<std::byte>());
  }
  const auto* const from =
      decoded ? packed_.view(place_.shape.dtype, count, place_.shape.hidden).as<std::byte>()
              : x.as<std::byte>();
  const size_t stride = decoded ? place_.line : size_t(x.stride(0)) * size_of(x.dtype());
  cpu::parallel_ranges(count, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const size_t at = decoded ? size_t(row) : size_t(sent[size_t(row)]);
      place_row(from + at * stride, place_.line, rows.uses(place_.rank, row),
                placed.as<std::byte>());
    }
  });
}

void MoeDispatchGemmCpu::place_wave(const MoePlan& plan, int wave, const MoeRows& rows,
                                    const Tensor& placed) {
  for (int step = 1; step < place_.world; ++step) {
    const int source = moe_source(place_.rank, place_.world, step);
    workspace_.await(wave_signal(source, wave), source, wave);
    const ScopedSpan span(SpanKind::compute, "moe_place", wave, source);
    const Range part = moe_wave(rows.arrived(source), plan.chunks, wave);
    const std::byte* from =
        workspace_.shared() + rows_offset(source) + size_t(part.begin) * place_.line;
    if (!plan.wire.is_none()) {
      const Tensor wave_rows = packed_.of(place_.shape.dtype, part.count, place_.shape.hidden);
      messages_.decode(workspace_.shared() + rows_offset(source) +
                           messages_before(plan, rows.arrived(source), wave),
                       part.count, wave_rows.as<std::byte>());
      from = wave_rows.as<std::byte>();
    }
    cpu::parallel_ranges(part.count, cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        place_row(from + size_t(row) * place_.line, place_.line,
                  rows.uses(source, part.begin + row), placed.as<std::byte>());
      }
    });
  }
}

void MoeDispatchGemmCpu::multiply(const MoeRows& rows, Range groups, const Product& product) const {
  for (int expert = 0; expert < int(place_.experts.count); ++expert) {
    const Range slots = rows.slots_of(expert, groups);
    if (slots.count > 0) product(expert, slots);
  }
}

void MoeDispatchGemmCpu::compute(const MoePlan& plan, const Tensor& x, const MoeRows& rows,
                                 const Tensor& placed, const Product& product) {
  place_own(plan, x, rows, placed);
  const ScopedLabel label("moe_dispatch_gemm", -1);
  if (place_.world == 1) return multiply(rows, {0, 1 + kMoePieces}, product);
  if (plan.overlapped) multiply(rows, {0, 1}, product);
  for (int wave = 0; wave < plan.chunks; ++wave) {
    place_wave(plan, wave, rows, placed);
    if (!plan.overlapped) continue;
    const Range pieces = moe_pieces(plan.chunks, wave);
    multiply(rows, {1 + pieces.begin, pieces.count}, product);
  }
  if (!plan.overlapped) multiply(rows, {0, 1 + kMoePieces}, product);
}

void MoeDispatchGemmCpu::forward(const MoePlan& plan, const Tensor& x, const MoeRouting& routing,
                                 MoeRows& rows, const std::function<Tensor()>& placed,
                                 const Product& product) {
  workspace_.begin();
  const std::string fault = MoeRows::fault_of(place_, routing);
  if (fault.empty()) rows.list_sent(place_, routing);
  send_routing(routing, rows, fault);
  if (fault.empty()) send_rows(plan, x, rows);
  receive_routing(rows, fault);
  compute(plan, x, rows, placed(), product);
}

void MoeDispatchGemmCpu::backward(const MoePlan& plan, const Tensor& dout, const MoeRows& rows,
                                  const Tensor& placed, const Product& product) {
  workspace_.begin();
  send_rows(plan, dout, rows);
  compute(plan, dout, rows, placed, product);
}

}  // namespace tandem
