// The members of a plain struct, found by the compiler: their number, types and names. An op's struct is the only place
// that lists its arguments; bindings/bind.h makes the Python function from it.
//
// The struct is an aggregate without base classes and without arrays. The technique is that of Boost.PFR: the number is
// the longest list of values the struct can be initialised from, and the compiler spells a member's name in
// __PRETTY_FUNCTION__.
#pragma once
#include <array>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace specengine {
namespace members {

constexpr size_t kMost = 16;

struct Anything {
  template <typename T>
  operator T() const;
};

template <typename T, size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return requires { T{(static_cast<void>(I), Anything{})...}; };
}

template <typename T, size_t count = kMost>
constexpr size_t count_of() {
  if constexpr (count == kMost) static_assert(!takes<T>(std::make_index_sequence<kMost + 1>()));
  if constexpr (takes<T>(std::make_index_sequence<count>())) {
    return count;
  } else {
    return count_of<T, count - 1>();
  }
}

// References to all members.
template <typename T>
constexpr auto tie(T& x) {
  constexpr size_t count = count_of<std::remove_const_t<T>>();
#define SPECENGINE_TIE(number, ...) \
  if constexpr (count == number) {  \
    auto& [__VA_ARGS__] = x;        \
    return std::tie(__VA_ARGS__);   \
  }
  SPECENGINE_TIE(1, a)
  SPECENGINE_TIE(2, a, b)
  SPECENGINE_TIE(3, a, b, c)
  SPECENGINE_TIE(4, a, b, c, d)
  SPECENGINE_TIE(5, a, b, c, d, e)
  SPECENGINE_TIE(6, a, b, c, d, e, f)
  SPECENGINE_TIE(7, a, b, c, d, e, f, g)
  SPECENGINE_TIE(8, a, b, c, d, e, f, g, h)
  SPECENGINE_TIE(9, a, b, c, d, e, f, g, h, i)
  SPECENGINE_TIE(10, a, b, c, d, e, f, g, h, i, j)
  SPECENGINE_TIE(11, a, b, c, d, e, f, g, h, i, j, k)
  SPECENGINE_TIE(12, a, b, c, d, e, f, g, h, i, j, k, l)
  SPECENGINE_TIE(13, a, b, c, d, e, f, g, h, i, j, k, l, m)
  SPECENGINE_TIE(14, a, b, c, d, e, f, g, h, i, j, k, l, m, n)
  SPECENGINE_TIE(15, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o)
  SPECENGINE_TIE(16, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
#undef SPECENGINE_TIE
}

template <typename T>
struct Holder {
  T value;
};
template <typename T>
extern const Holder<T> kUnmade;  // declared only: the addresses of its members are known, nothing is ever read

template <auto member>
constexpr std::string_view spelled() {
  std::string_view text =
      __PRETTY_FUNCTION__;  // "... [with auto member = (& kUnmade<Op>.Holder<Op>::value.Op::x); ..."
  text.remove_prefix(text.find("member = "));
  text = text.substr(0, text.find_first_of(";]"));
  while (text.ends_with(')')) text.remove_suffix(1);
  return text.substr(text.find_last_of(":.") + 1);
}

template <typename... T>
std::tuple<std::remove_cvref_t<T>...> values_of(std::tuple<T&...>);

}  // namespace members

template <typename T>
constexpr size_t kMemberCount = members::count_of<T>();

// std::tuple of the members' types.
template <typename T>
using MemberTypes = decltype(members::values_of(members::tie(std::declval<const T&>())));

template <typename T>
constexpr std::array<std::string_view, kMemberCount<T>> kMemberNames = []<size_t... I>(std::index_sequence<I...>) {
  return std::array{members::spelled<&std::get<I>(members::tie(members::kUnmade<T>.value))>()...};
}(std::make_index_sequence<kMemberCount<T>>());

}  // namespace specengine
