// Filters of lists.
#pragma once

#include <vector>

#include "engine/chat/jinja/jinja_arguments.h"

namespace tandem::jinja {

Value make_list(const std::vector<Value>& values);
/// Keys and values of a dictionary, [(key, value), …]; nothing of undefined.
Value pairs(const Value& dictionary);
/// Attribute or element by a path, "a.b.0", or a number; undefined if there is none.
Value path_attribute(const Value& value, const Value& path);

Value batch(const Value& value, const Bound& arguments);
/// The filter `slice`.
Value divide(const Value& value, const Bound& arguments);
Value dictsort(const Value& value, const Bound& arguments);
/// Tuples of a value of the attribute and the list of the elements that have it.
Value groupby(const Value& value, const Bound& arguments);
/// `max` or `min`.
Value extreme(const Value& value, const Bound& arguments, bool is_max);
Value join(const Value& value, const Bound& arguments);
Value sort(const Value& value, const Bound& arguments);
Value sum(const Value& value, const Bound& arguments);
Value unique(const Value& value, const Bound& arguments);

}  // namespace tandem::jinja
