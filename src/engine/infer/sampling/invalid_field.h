// Error of a value of a request that is out of its range.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "tandem/error.h"

namespace tandem {

/// "FIELD VALUE: expected EXPECTED". The field has the name that clients give it.
class InvalidField : public InvalidArgument {
 public:
  template <typename Value>
  InvalidField(std::string_view field, const Value& value, std::string_view expected)
      : InvalidArgument(fmt::format("{} {}: expected {}", field, value, expected)), field_(field) {}
  const std::string& field() const { return field_; }

 private:
  std::string field_;
};

}  // namespace tandem
