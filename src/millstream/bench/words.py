"""Common English words: in nearly every vocabulary each is one token, so a prompt's length is its number of words."""

_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years much where your way down should because long
each just state those people too good very make world still see own work men day get here old life both between
being under three never know same last another while us might great go year since against right came take himself
few house use during without again place around however home small found thought went say part once general high
upon school every does got united left number course war until always away something fact water less public put
think almost hand enough far took head yet government system set told nothing night end why called find going look
asked later point knew next city business give group toward young days let room side social given present several
order national second possible rather per face among form important often things early white case large big need
four within felt children along saw best church ever least power development light thing seemed family interest
want members mind country area others done turned although open god service problem certain kind different thus
began door help sense means whole matter law human action company line show run field true sun moon river stone
wheel green blue red black bread paper table music letter money garden horse winter summer morning evening
"""
WORDS = tuple(_TEXT.split())
