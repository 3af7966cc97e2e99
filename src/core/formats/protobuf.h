// Wire format of protobuf, as far as it is written here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tandem {

enum class ProtoWire : uint8_t { varint = 0, eight_bytes = 1, counted = 2, four_bytes = 5 };

inline void append_varint(std::string& to, uint64_t value) {
  for (; value >= 128; value >>= 7) to += char((value & 127) | 128);
  to += char(value);
}

inline void append_key(std::string& to, int field, ProtoWire wire) {
  append_varint(to, uint64_t(field) << 3 | uint64_t(wire));
}

/// A number of type uint64, int64 or int32, none of them negative, or a bool.
inline void append_number(std::string& to, int field, uint64_t value) {
  append_key(to, field, ProtoWire::varint);
  append_varint(to, value);
}

/// A string, a message, or packed numbers.
inline void append_counted(std::string& to, int field, std::string_view bytes) {
  append_key(to, field, ProtoWire::counted);
  append_varint(to, bytes.size());
  to += bytes;
}

}  // namespace tandem
