#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <vector>

#include "codec/numbers.h"
#include "codec/whole_codec.h"
#include "tandem/codec.h"
#include "tandem/error.h"

namespace tandem {

using namespace codec;

namespace {

constexpr Codec kCodecs[] = {Codec::none, Codec::int8,  Codec::int6,  Codec::int5,
                             Codec::int4, Codec::int3,  Codec::int2,  Codec::e4m3,
                             Codec::e5m2, Codec::mxfp8, Codec::mxfp6, Codec::mxfp4};

[[noreturn]] void refuse(std::string_view text, const std::string& problem) {
  throw InvalidArgument(fmt::format("codec '{}': {}", text, problem));
}

Codec codec_named(std::string_view text, std::string_view name) {
  std::vector<std::string_view> names;
  for (const Codec codec : kCodecs) {
    if (name == name_of(codec)) return codec;
    names.push_back(name_of(codec));
  }
  for (size_t i = 0; i < whole_codecs().size(); ++i) {
    if (name == whole_codecs()[i].name) return Codec(int(Codec::lossless) + int(i));
    names.push_back(whole_codecs()[i].name);
  }
  refuse(text, fmt::format("expected one of {}, such as int8, int4:g32", fmt::join(names, ", ")));
}

void take_option(std::string_view text, std::string_view option, Wire& wire) {
  if (option.starts_with('g')) {
    const std::string_view digits = option.substr(1);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), wire.group);
    if (error == std::errc() && end == digits.data() + digits.size()) return;
  }
  if (option == "asym") {
    wire.asymmetric = true;
  } else if (option == "f32") {
    wire.scale = ScaleKind::f32;
  } else if (option == "log2") {
    wire.scale = ScaleKind::log2;
  } else if (option == "spikes") {
    wire.spikes = true;
  } else if (option == "hadamard") {
    wire.hadamard = true;
  } else {
    refuse(text, fmt::format("'{}': expected gGROUP, asym, f32, log2, spikes or hadamard", option));
  }
}

}  // namespace

std::string_view name_of(Codec codec) {
  switch (codec) {
    case Codec::none:
      return "none";
    case Codec::int8:
      return "int8";
    case Codec::int6:
      return "int6";
    case Codec::int5:
      return "int5";
    case Codec::int4:
      return "int4";
    case Codec::int3:
      return "int3";
    case Codec::int2:
      return "int2";
    case Codec::e4m3:
      return "e4m3";
    case Codec::e5m2:
      return "e5m2";
    case Codec::mxfp8:
      return "mxfp8";
    case Codec::mxfp6:
      return "mxfp6";
    case Codec::mxfp4:
      return "mxfp4";
    case Codec::lossless:
      break;
  }
  const WholeCodec* whole = find_whole_codec(codec);
  return whole ? whole->name : "?";
}

Wire Wire::parse(std::string_view text) {
  Wire wire;
  size_t at = text.find(':');
  wire.codec = codec_named(text, text.substr(0, at));
  if (is_mx(wire.codec)) wire.group = 32, wire.scale = ScaleKind::e8m0;
  if (at != text.npos && !is_grouped(wire.codec)) {
    refuse(text, fmt::format("'{}': {} has no options", text.substr(at), name_of(wire.codec)));
  }
  while (at != text.npos) {
    const size_t next = text.find(':', at + 1);
    take_option(text, text.substr(at + 1, next == text.npos ? next : next - at - 1), wire);
    at = next;
  }
  wire.check();
  return wire;
}

std::string Wire::describe() const {
  std::string text(name_of(codec));
  if (!is_grouped(codec)) return text;
  if (group != (is_mx(codec) ? 32 : 128)) text += fmt::format(":g{}", group);
  if (asymmetric) text += ":asym";
  if (scale == ScaleKind::f32) text += ":f32";
  if (scale == ScaleKind::log2) text += ":log2";
  if (spikes) text += ":spikes";
  if (hadamard) text += ":hadamard";
  return text;
}

void Wire::check() const {
  if (!is_grouped(codec)) return;
  const std::string text = describe();
  const int bits = code_bits(codec);
  if (is_mx(codec) ? group != 32 : group != 16 && group != 32 && group != 64 && group != 128) {
    refuse(text,
           fmt::format("group {}: expected {}", group, is_mx(codec) ? "32" : "16, 32, 64 or 128"));
  }
  if (is_mx(codec) != (scale == ScaleKind::e8m0)) {
    refuse(text, "scales of MX formats are powers of two, and of no others");
  }
  if (asymmetric && !is_integer(codec)) refuse(text, "asym: expected a codec of integers");
  if (spikes && (!is_integer(codec) || bits > 3)) refuse(text, "spikes: expected int3 or int2");
  if (hadamard && (!is_integer(codec) || bits > 4 || spikes)) {
    refuse(text, "hadamard: expected int4, int3 or int2 without spikes");
  }
}

size_t Wire::bytes(int64_t elements, DType dtype) const {
  if (codec == Codec::none) return size_t(elements) * size_of(dtype);
  if (const WholeCodec* whole = find_whole_codec(codec)) return whole->max_bytes(elements, dtype);
  return Message::of(*this, elements).bytes;
}

double Wire::bits_per_element(DType dtype) const {
  constexpr int64_t kMany = 1 << 20;
  if (const WholeCodec* whole = find_whole_codec(codec)) return whole->bits_per_element(dtype);
  return 8 * double(bytes(kMany, dtype)) / double(kMany);
}

double Wire::error_bound() const {
  if (is_exact()) return 0;
  const double wider = scale == ScaleKind::bf16   ? 1 + 0x1p-7
                       : scale == ScaleKind::log2 ? 1.1893
                       : scale == ScaleKind::e8m0 ? 2
                                                  : 1;
  const int bits = code_bits(codec);
  double bound = with_format(*this, [](auto format) {
    return double(decltype(format)::half_step) / double(decltype(format)::maximum);
  });
  // A group may contain both signs of its absmax; a bf16 center is off by up to 2^-9.
  if (asymmetric) bound = (1 + 0x1p-8) / ((1 << bits) - 1);
  if (hadamard) bound *= group;
  if (spikes) bound = std::max(bound, 0x1p-8);
  return bound * wider * (1 + 1e-4);
}

}  // namespace tandem
